"""LoRA layers on the C++ kernel: one call forward and one backward for weight, branch, quantising and rounding.

`use_native_lora` gives `FusedLoraLinear` layers of a bf16 model on a CPU a forward through `kernels.cpu.linear` where
nothing speaks against it (`why_not`).  Parameters, names, saving and merging stay PEFT's, as in `adapters.fused`; what
the fused forward does not take the native one does not take either, and falls back to it at each call.

A layer whose recipe wants the input gradient in int8 gets its frozen weight's codes packed here, once: a byte a weight.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn

from lumen.adapters.fused import FusedLoraLinear, why_not_fused
from lumen.core.log import note
from lumen.formats import QuantSpec
from lumen.kernels.cpu.library import missing
from lumen.kernels.cpu.linear import Codes, fits, lora_linear, pack_codes
from lumen.quant.gemm import weight_codes
from lumen.quant.linear import QuantLinear

_ROW = QuantSpec.parse("int8:row")


class NativeLoraLinear(FusedLoraLinear):
    """`FusedLoraLinear` by the C++ kernel.

    codes: of the weight, for an int8 input gradient.  planned: the base layer's plan that they were made for.
    """

    codes: Codes | None
    planned: Any

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """x [..., in] → [..., out]; anything but bf16 outside autocast runs the fused forward."""
        other = args or kwargs or x.dtype != torch.bfloat16 or torch.is_autocast_enabled("cpu")
        base: Any = self.base_layer
        # someone watches the base layer, or gave it another format since
        other = other or base._forward_hooks or base._forward_pre_hooks
        if other or getattr(base, "plan", None) is not self.planned or why_not_fused(self) is not None:
            return super().forward(x, *args, **kwargs)
        (name,) = self.active_adapters
        down: Any = self.lora_A[name].weight
        up: Any = self.lora_B[name].weight
        flat = x.reshape(-1, x.shape[-1])
        y = lora_linear(
            flat, base._parameters["weight"], down.float(), up.float(), float(self.scaling[name]), self.codes
        )
        if base.bias is not None:
            y = y + base.bias.to(y.dtype)
        return y.view(*x.shape[:-1], y.shape[-1])


def why_not(layer: FusedLoraLinear) -> str | None:
    """What keeps a layer from the kernel; None where nothing does."""
    base: Any = layer.base_layer
    weight = base._parameters.get("weight")
    if isinstance(base, QuantLinear) and base.plan.stores_codes:
        return "weight in codes"
    if weight is None or weight.dtype != torch.bfloat16 or weight.device.type != "cpu":
        return "not bf16 on a CPU"
    if weight.requires_grad:
        return "trained weight"
    if not fits(base.in_features, base.out_features):
        return f"{base.in_features} × {base.out_features}"
    if base._forward_hooks or base._forward_pre_hooks or base._backward_hooks:
        return "hooks on the base layer"
    if type(base) is nn.Linear:
        return None
    if not isinstance(base, QuantLinear):
        return type(base).__name__
    plan = base.plan
    if not plan.frozen or plan.forward.how != "none" or {plan.dgrad.left, plan.dgrad.right} != {_ROW}:
        return "recipe"
    return None


def use_native_lora(model: nn.Module) -> dict[str, int]:
    """Move every layer that can to the kernel, in place.  Returns reason → layers that stay (empty key: moved)."""
    counts: Counter[str] = Counter()
    for module in model.modules():
        if type(module) is not FusedLoraLinear:
            continue
        reason = why_not(module)
        if reason is None and (reason := missing()):
            note(f"LoRA layers run in plain torch: {reason}; the result is the same, slower")
        if not reason:
            base: Any = module.base_layer
            codes = None
            if isinstance(base, QuantLinear):
                codes = pack_codes(*weight_codes(base._master().detach(), base.plan)[1])
            module.__dict__.update(codes=codes, planned=getattr(base, "plan", None))
            module.__class__ = NativeLoraLinear
        counts[reason or ""] += 1
    return dict(counts)
