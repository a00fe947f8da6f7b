"""Names of a model's parts, found from its structure so that every architecture works.

A causal language model is embedding → a ModuleList of equal decoder layers → norm → head.  The parts have different
names in every architecture (`model.layers`, `transformer.h`, `gpt_neox.layers`); what they *are* is the same.  Linear
layers come as `nn.Linear` (weight [out, in]) and, in GPT-2's family, as transformers' `Conv1D` (weight [in, out]).
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from torch import nn

from lumen.core import ModelError, note

_ROUTER_NAMES = {"gate", "router", "shared_expert_gate", "gate_logits"}
_HEAD_NAMES = {"lm_head", "embed_out", "output", "score", "classifier"}


def decoder_layers(model: nn.Module) -> tuple[str, nn.ModuleList]:
    """Dotted name and ModuleList of the decoder layers.

    The list whose length is the config's number of layers, the outermost such; else the longest outermost list.
    Raises ModelError where there is none.
    """
    config = getattr(model, "config", None)
    count = getattr(getattr(config, "text_config", None) or config, "num_hidden_layers", None)
    lists = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    outer = [(n, m) for n, m in lists if not any(n.startswith(other + ".") for other, _ in lists) and len(m) > 0]
    if not outer:
        raise ModelError(f"no list of decoder layers was found in {type(model).__name__}")
    exact = [pair for pair in outer if len(pair[1]) == count]
    return max(exact or outer, key=lambda pair: sum(p.numel() for p in pair[1].parameters()))


def layer_names(model: nn.Module) -> list[str]:
    """Dotted names of the decoder layers, first to last."""
    name, layers = decoder_layers(model)
    return [f"{name}.{i}" for i in range(len(layers))]


def name_of(model: nn.Module, part: nn.Module | None) -> str | None:
    """Dotted name of a module inside the model, or None."""
    return next((name for name, module in model.named_modules() if module is part), None) if part is not None else None


def embedding_name(model: nn.Module) -> str:
    """Dotted name of the input embedding."""
    name = name_of(model, model.get_input_embeddings())  # type: ignore[operator]
    if name is None:
        raise ModelError(f"{type(model).__name__} has no input embedding")
    return name


def head_name(model: nn.Module) -> str | None:
    """Dotted name of the output head, None where the model has none."""
    return name_of(model, model.get_output_embeddings())  # type: ignore[operator]


def is_tied(model: nn.Module) -> bool:
    """Whether embedding and head are one parameter."""
    embedding = model.get_input_embeddings()  # type: ignore[operator]
    head = model.get_output_embeddings()  # type: ignore[operator]
    return head is not None and getattr(head, "weight", None) is getattr(embedding, "weight", object())


def is_linear(module: nn.Module) -> bool:
    """A linear layer of any kind: nn.Linear and its subclasses (QuantLinear), or GPT-2's Conv1D."""
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


def stores_codes(module: nn.Module) -> bool:
    """Whether a linear layer's weight is frozen codes (a QuantLinear), not a floating-point parameter."""
    weight = module._parameters.get("weight")
    return is_linear(module) and (weight is None or weight.dtype.itemsize == 1)


def is_router(name: str, module: nn.Module, experts: int | None) -> bool:
    """A mixture-of-experts router: by its usual names, or one output per expert."""
    leaf = name.rpartition(".")[2]
    return leaf in _ROUTER_NAMES or (experts is not None and getattr(module, "out_features", None) == experts)


def linear_names(model: nn.Module) -> list[str]:
    """Dotted names of the linear layers that adapters and low precision may touch: neither heads nor routers."""
    config = getattr(model, "config", None)
    text = getattr(config, "text_config", None) or config
    experts = next(
        (n for key in ("num_experts", "num_local_experts", "n_routed_experts") if (n := getattr(text, key, None))), None
    )
    head = head_name(model) if hasattr(model, "get_output_embeddings") else None
    return [
        name
        for name, module in model.named_modules()
        if is_linear(module)
        and name != head
        and name.rpartition(".")[2] not in _HEAD_NAMES
        and not is_router(name, module, experts)
    ]


def stacked_expert_names(model: nn.Module) -> list[str]:
    """Dotted names of expert weights that lie in one 3-D tensor (`…experts.gate_up_proj`), in codes or not."""
    return [
        f"{name}.{part}"
        for name, module in model.named_modules()
        if hasattr(module, "is_transposed") and hasattr(module, "num_experts")
        for part in ("gate_up_proj", "up_proj", "down_proj")
        if part in module._parameters or part in module._modules
    ]


def matches(name: str, target: str) -> bool:
    """Whether a dotted name is `target` or ends in `.target` (`q_proj` and `self_attn.q_proj`, never `my_q_proj`)."""
    return name == target or name.endswith("." + target)


def resolve_targets(model: nn.Module, targets: Iterable[str]) -> list[str]:
    """What `lora_target` names, as names PEFT matches: leaf names where they are unambiguous, else full names.

    `all` is every layer of `linear_names`.  A name that matches nothing raises ModelError with the names there are.
    """
    wanted = list(targets)
    everything = linear_names(model)
    if wanted == ["all"]:
        if experts := stacked_expert_names(model):
            note(
                f"lora_target: all gives no adapter to {len(experts)} stacked expert weights "
                f"({experts[0]} …): they are no linear layers; attention and shared layers get theirs"
            )
        excluded = {n.rpartition(".")[2] for n, m in model.named_modules() if is_linear(m)} - _leaves(everything)
        taken = {n.rpartition(".")[2] for n, m in model.named_modules() if is_linear(m) and n not in everything}
        ambiguous = taken - excluded
        plain = sorted(_leaves(everything) - ambiguous)
        return plain + [n for n in everything if n.rpartition(".")[2] in ambiguous]
    candidates = [n for n, m in model.named_modules() if is_linear(m) or isinstance(m, nn.Embedding)]
    for target in wanted:
        if not any(matches(name, target) for name in candidates):
            raise unknown_module(target, candidates, where="lora_target")
    return wanted


def resolve_modules(model: nn.Module, names: Iterable[str], *, where: str) -> list[str]:
    """Check that each name matches a module of the model; returns the names."""
    candidates = [n for n, _ in model.named_modules() if n]
    for name in names:
        if not any(matches(candidate, name) for candidate in candidates):
            raise unknown_module(name, candidates, where=where)
    return list(names)


def unknown_module(name: str, candidates: Iterable[str], *, where: str) -> ModelError:
    """The error for a module name that does not exist, with the nearest and the names there are."""
    leaves = sorted(leaf for leaf in _leaves(candidates) if not leaf.isdigit())
    near = difflib.get_close_matches(name.rpartition(".")[2], leaves, n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    return ModelError(f"no module is called {name}", where=where, fix=f"{hint}names: {', '.join(leaves)}")


def _leaves(names: Iterable[str]) -> set[str]:
    return {name.rpartition(".")[2] for name in names}
