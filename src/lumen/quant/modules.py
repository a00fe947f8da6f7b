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


EXPERTS_UP = ("gate_up_proj", "up_proj")
EXPERTS_DOWN = "down_proj"
_EXPERTS = ("is_transposed", "has_gate", "has_bias", "num_experts", "_apply_gate")
"""What transformers' experts interface gives a module whose experts lie in one tensor."""


def is_conv1d(module: nn.Module) -> bool:
    """Whether a module is transformers' Conv1D (by name: importing transformers is not for this room)."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def is_experts(module: nn.Module) -> bool:
    """Whether a module is a stack of experts that transformers' experts interface runs."""
    return all(hasattr(module, mark) for mark in _EXPERTS) and not getattr(module, "_is_expert_parallel", False)


def stacks(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Names and values of the 3-D weights of an experts module that are not quantised."""
    if is_experts(module):
        for name in (*EXPERTS_UP, EXPERTS_DOWN):
            weight = module._parameters.get(name)
            if weight is not None and weight.ndim == 3:
                yield name, weight


@dataclass(frozen=True)
class Found:
    """path: where it hangs in this model.  name: what rules call it.  protected: why it stays in high precision unless
    a rule names it, or empty.  tied: whether an embedding shares its weight.  parameter: its weight's name in `module`;
    another than `weight` is a stack of experts, whose path ends in it."""

    path: str
    name: str
    module: nn.Module
    protected: str = ""
    tied: bool = False
    parameter: str = "weight"

    @property
    def weight(self) -> nn.Parameter:
        found = self.module._parameters[self.parameter]
        assert found is not None
        return found

    @property
    def in_features(self) -> int:
        """Length of the dimension that forward contracts."""
        if self.parameter != "weight":
            return self.weight.shape[1 if self.module.is_transposed else 2]
        return self.weight.shape[0 if is_conv1d(self.module) else 1]


def plain_name(path: str) -> str:
    """`base_model.model.model.layers.0.q_proj.base_layer` → `model.layers.0.q_proj`."""
    if path.startswith("base_model.model."):
        path = path.removeprefix("base_model.model.")
    return ".".join(part for part in path.split(".") if part not in _WRAPPERS)


def linear_layers(model: nn.Module) -> Iterator[Found]:
    """Every nn.Linear (subclasses with a forward of their own are not), Conv1D and stack of experts' weights outside
    adapters, in module order.

    A module that hangs in two places comes once per place.
    """
    heads = _output_heads(model)
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    for path, module in _walk(model):
        for name, _ in stacks(module):
            yield Found(f"{path}.{name}", f"{plain_name(path)}.{name}", module, parameter=name)
        if not is_conv1d(module) and (
            not isinstance(module, nn.Linear) or type(module).forward is not nn.Linear.forward
        ):
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
        elif plain_name(path).rpartition(".")[2] in _ROUTERS and module._parameters:
            found[plain_name(path)] = "router"
        elif not isinstance(module, nn.Linear) and not is_conv1d(module) and not hasattr(module, "plan"):
            known = {name for name, _ in stacks(module)}
            if any(p.ndim >= 2 and n not in known for n, p in module.named_parameters(recurse=False)):
                found[plain_name(path)] = f"{type(module).__name__} is no linear layer that Lumen knows"
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
