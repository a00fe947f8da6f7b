"""Plain LoRA in the model's own dtype: the same update, fewer bytes moved.

LoRA adds s · (x Aᵀ) Bᵀ to a frozen layer's x Wᵀ, with A [r, in], B [out, r] and s = alpha / r.  The arithmetic is tiny
(r = 8 against hundreds), so what it costs is memory traffic.  PEFT keeps A and B in fp32, as Lumen does, and computes
in *their* dtype: it casts x to fp32, makes an fp32 [tokens, out], scales it, adds it to the bf16 result in fp32 and
casts back: five passes over the largest tensors of the layer, and fp32 copies of x kept for backward.

Here A and s·B (a few kilobytes) are cast to x's dtype instead, and the second product accumulates onto the base result:

    h = x Aᵀ            [tokens, r]
    y = x Wᵀ + h (sB)ᵀ  [tokens, out], one pass

The parameters, their gradients and the optimizer stay fp32.  In bf16 the result differs from PEFT's by bf16 rounding of
a term that is itself a small correction; in fp32 it is PEFT's up to the order of sums.

`fuse_lora` gives PEFT's plain linear layers this forward by replacing the modules' class (a subclass of PEFT's own):
parameters, names, state_dict keys, saving, merging and disabling are PEFT's.  Anything else (dropout, DoRA and the
other variants, several active adapters, mixed batches, LoRA biases, merged or disabled adapters) runs PEFT's forward.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from peft.tuners.lora.layer import Linear as PeftLinear
from torch import Tensor, nn


class FusedLoraLinear(PeftLinear):
    """PEFT's LoRA linear layer with the fused forward where `why_not_fused` finds nothing against it."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """x [..., in] in the compute dtype → [..., out] in the dtype of the base layer's result."""
        if args or kwargs or why_not_fused(self) is not None:
            return super().forward(x, *args, **kwargs)
        (name,) = self.active_adapters
        base = self.base_layer(x)
        down: Any = self.lora_A[name]
        up: Any = self.lora_B[name]
        a = down.weight.to(x.dtype)
        b = (up.weight * self.scaling[name]).to(base.dtype)
        h = x.reshape(-1, x.shape[-1]) @ a.T
        return torch.addmm(base.reshape(-1, base.shape[-1]), h.to(base.dtype), b.T).view(base.shape)


def why_not_fused(layer: PeftLinear) -> str | None:
    """What makes PEFT's own forward necessary for this layer now; None where the fused one computes the same."""
    active = layer.active_adapters
    if layer.disable_adapters or layer.merged:
        return "adapter disabled or merged"
    if len(active) != 1:
        return f"{len(active)} active adapters"
    name = active[0]
    if name not in layer.lora_A:
        return "no adapter of the active name"
    if name in layer.lora_variant:
        return type(layer.lora_variant[name]).__name__.removesuffix("LinearVariant")
    if not isinstance(layer.lora_dropout[name], nn.Identity):
        return "dropout"
    if layer.lora_bias.get(name):
        return "LoRA bias"
    # a replaced factor (another low-rank layer, a parametrisation) must be called, not read
    if type(layer.lora_A[name]) is not nn.Linear or type(layer.lora_B[name]) is not nn.Linear:
        return "adapter factors of another kind"
    return None


@dataclass
class FuseReport:
    """What `fuse_lora` did.

    fused:  number of layers with the fused forward.
    kept:   reason → number of LoRA layers that run PEFT's forward.
    undo:   gives every layer its class back.
    """

    fused: int
    kept: dict[str, int] = field(default_factory=dict)
    undo: Callable[[], None] = lambda: None

    def __str__(self) -> str:
        rest = "".join(f", {count} by PEFT's own forward ({reason})" for reason, count in self.kept.items())
        return f"LoRA: {self.fused} layers fused{rest}"


def fuse_lora(model: nn.Module) -> FuseReport:
    """Give every plain LoRA linear layer of a PEFT model the fused forward, in place; idempotent."""
    changed: list[PeftLinear] = []
    fused = 0
    kept: Counter[str] = Counter()
    for module in model.modules():
        if not isinstance(module, PeftLinear):
            continue
        if isinstance(module, FusedLoraLinear):
            fused += 1
        elif type(module) is not PeftLinear:
            kept[type(module).__name__] += 1
        elif (reason := why_not_fused(module)) is not None:
            kept[reason] += 1
        else:
            module.__class__ = FusedLoraLinear
            changed.append(module)
            fused += 1

    def undo() -> None:
        for module in changed:
            module.__class__ = PeftLinear

    return FuseReport(fused, dict(kept), undo)
