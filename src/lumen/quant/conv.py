"""GPT-2's Conv1D: a linear layer whose weight lies the other way round, [in, out].

y = x·W + b with W [K, N].  It is quantised as the linear layer of Wᵀ [N, K], so scales run along the same dimension as
everywhere; a master stays the parameter [K, N] that the model has, and what `dequantize` puts back is a Conv1D.  PEFT
sees an nn.Linear, whose adapters have the shapes they have for a Conv1D.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from lumen.quant.gemm import Codes
from lumen.quant.linear import QuantLinear, share_hooks
from lumen.quant.plan import LayerPlan


class QuantConv1D(QuantLinear):
    """A QuantLinear that came from a Conv1D; `weight` is [N, K], the master and a dense state dict are [K, N]."""

    kind: type

    @classmethod
    def from_linear(cls, linear: Any, plan: LayerPlan, weight: torch.Tensor | Codes | None = None) -> QuantConv1D:
        """A quantised twin of a Conv1D, as `QuantLinear.from_linear`; a dense `weight` is [K, N]."""
        linear.in_features, linear.out_features = linear.weight.shape
        try:
            layer = super().from_linear(linear, plan, weight)
        finally:
            del linear.in_features, linear.out_features
        assert isinstance(layer, QuantConv1D)
        layer.kind = type(linear)
        return layer

    @staticmethod
    def _turn(dense: torch.Tensor) -> torch.Tensor:
        return dense.t()

    def to_linear(self, *, adapted: bool = False) -> Any:
        """The Conv1D again, as `QuantLinear.to_linear`."""
        conv: Any = object.__new__(self.kind)
        nn.Module.__init__(conv)
        conv.nf, conv.nx = self.out_features, self.in_features
        if self.plan.stores_codes:
            conv.weight = nn.Parameter(self.original_weight().contiguous(), requires_grad=False)
        else:
            conv.weight = self._master()
        if self.plan.frozen:
            conv.weight.requires_grad_(self._was_trainable and not adapted)
        conv._parameters["bias"] = self.bias
        share_hooks(self, conv)
        return conv.train(self.training)
