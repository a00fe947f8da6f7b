"""Which modules of a model a policy speaks about, under which names, and which of them it must leave alone.

Names are those of the bare model: what PEFT, compile and checkpoint wrappers add to a dotted name is taken out, so a
policy means the same before and after an adapter is injected.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

_WRAPPERS = ("base_layer", "_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
_HEADS = ("lm_head", "embed_out", "output_layer", "head", "score", "classifier", "qa_outputs", "v_head")
_ROUTERS = ("gate", "router", "shared_expert_gate")


@dataclass(frozen=True)
class Found:
    """path: where it hangs in this model.  name: what rules call it.  protected: why it stays in high precision unless
    a rule names it, or empty.  tied: whether an embedding shares its weight."""

    path: str
    name: str
    module: nn.Module
    protected: str = ""
    tied: bool = False


def plain_name(path: str) -> str:
    """`base_model.model.model.layers.0.q_proj.base_layer` → `model.layers.0.q_proj`."""
    if path.startswith("base_model.model."):
        path = path.removeprefix("base_model.model.")
    return ".".join(part for part in path.split(".") if part not in _WRAPPERS)


def linear_layers(model: nn.Module) -> Iterator[Found]:
    """Every nn.Linear (subclasses with a forward of their own are not) outside adapters, in module order.

    A module that hangs in two places comes once per place.
    """
    heads = _output_heads(model)
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    for path, module in _walk(model):
        if not isinstance(module, nn.Linear) or type(module).forward is not nn.Linear.forward:
            continue
        tied = id(module._parameters.get("weight")) in embeddings
        last = plain_name(path).rpartition(".")[2]
        protected = ""
        if tied or id(module) in heads or last in _HEADS:
            protected = "output head" + (" tied to the embedding" if tied else "")
        elif last in _ROUTERS:
            protected = "router"
        yield Found(path, plain_name(path), module, protected, tied)


def left_alone(model: nn.Module) -> dict[str, str]:
    """Modules that hold large weights but are no nn.Linear: name → why they are not quantised."""
    found = {}
    for path, module in _walk(model):
        if isinstance(module, nn.Embedding):
            found[plain_name(path)] = "embedding"
        elif not isinstance(module, nn.Linear) and any(
            p.ndim >= 2 for p in module.parameters(recurse=False)
        ):  # GPT-2's Conv1D, fused experts
            found[plain_name(path)] = f"{type(module).__name__} is not nn.Linear: not built in this version"
    return found


def _walk(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Modules by path, without what adapters added: of a PEFT layer only its base layer, of saved copies nothing."""

    def visit(path: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        yield path, module
        children = module._modules.items()
        if hasattr(module, "adapter_layer_names") or hasattr(module, "base_layer"):  # a PEFT tuner layer
            children = {"base_layer": module._modules.get("base_layer")}.items()
        elif "modules_to_save" in module._modules:  # trained copies stay as they are
            return
        for name, child in children:
            if child is not None:
                yield from visit(f"{path}.{name}" if path else name, child)

    yield from visit("", model)


def _output_heads(model: nn.Module) -> set[int]:
    heads = set()
    for module in model.modules():
        getter = getattr(module, "get_output_embeddings", None)
        if callable(getter):
            head = getter()
            if isinstance(head, nn.Module):
                heads.add(id(head))
    return heads
