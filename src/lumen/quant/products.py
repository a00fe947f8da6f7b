"""forward, dgrad and wgrad of one layer as one step of autograd.

What autograd keeps for backward: for dgrad the codes themselves (no copy); for wgrad, where there is one, the input, or
its codes if `saved_input` has a spec.  Nothing in high precision is kept for a frozen weight.  Where nothing needs a
gradient (evaluation, or a first layer behind frozen embeddings) autograd is left out: there is nothing to keep, and
torch.compile would break its graph at an autograd function without a differentiable input.
"""

from __future__ import annotations

from typing import Any

import torch

from lumen.quant import gemm
from lumen.quant.live import Live
from lumen.quant.plan import LayerPlan

Tensors = tuple[torch.Tensor, ...]


def multiply(
    x: torch.Tensor, plan: LayerPlan, wgrad: bool, out_features: int, collect: bool, tensors: Tensors
) -> torch.Tensor:
    """x [M, K] → y [M, N].

    wgrad:   whether the master gets a gradient.  collect: whether this pass counts for the histories.
    tensors: the master, where there is one, then the codes, then what `QuantLinear._live` gave.
    """
    if torch.is_grad_enabled() and (x.requires_grad or wgrad):
        y: torch.Tensor = Products.apply(x, plan, wgrad, out_features, collect, *tensors)
        return y
    weight, codes, extra = split(plan, tensors)
    forward = codes[: gemm.num_codes(plan.forward.right)]
    return gemm.forward_gemm(x, weight, forward, plan, (out_features, x.shape[1]), Live.of(plan, extra, collect))


def split(plan: LayerPlan, tensors: Tensors) -> tuple[torch.Tensor | None, Tensors, Tensors]:
    """The master or None, the codes, and the tensors of `Live`."""
    rest, extra = tensors[: len(tensors) - plan.num_live], tensors[len(tensors) - plan.num_live :]
    return (None, rest, extra) if plan.stores_codes else (rest[0], rest[1:], extra)


class Products(torch.autograd.Function):
    """forward, dgrad and wgrad of one layer on a 2-D input; which of them run in low precision is the plan's."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        plan: LayerPlan,
        wgrad: bool,
        out_features: int,
        collect: bool,
        *tensors: torch.Tensor,
    ) -> torch.Tensor:
        # an argument that is None would make Dynamo break the graph, so there is none
        weight, codes, extra = split(plan, tensors)
        live = Live.of(plan, extra, collect)
        count = gemm.num_codes(plan.forward.right)
        forward = codes[:count]
        from_forward = gemm.shares_codes(plan) or (plan.fresh and plan.stores_codes)
        back = forward if from_forward else codes[count:]
        saved: tuple[torch.Tensor, ...] = ()
        if wgrad:
            saved = gemm.encode_operand(x, plan.saved_input, 1, "saved_input", live) if plan.saved_input else (x,)
        dense = () if back else (weight,)
        # `amax_now` is written into by every pass, so it is no saved tensor
        kept = extra[:-1] if plan.tracked else extra
        ctx.save_for_backward(*kept, *saved, *dense, *back)
        ctx.now, ctx.num_kept, ctx.collect = extra[-1:] if plan.tracked else (), len(kept), collect
        ctx.plan, ctx.wgrad, ctx.num_saved, ctx.num_codes = plan, wgrad, len(saved), len(codes)
        ctx.x_shape, ctx.weight_dtype = tuple(x.shape), None if weight is None else weight.dtype
        ctx.has_dense = len(back) == 0
        return gemm.forward_gemm(x, weight, forward, plan, (out_features, x.shape[1]), live)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        (dy,) = grads
        plan: LayerPlan = ctx.plan
        kept = ctx.saved_tensors  # read once: checkpointing recomputes at each reading
        live, kept = Live.of(plan, (*kept[: ctx.num_kept], *ctx.now), ctx.collect), kept[ctx.num_kept :]
        saved, rest = kept[: ctx.num_saved], kept[ctx.num_saved :]
        dx = dw = None
        if ctx.needs_input_grad[0]:
            weight, back = (rest[0], ()) if ctx.has_dense else (None, rest)
            dx = gemm.dgrad_gemm(dy, weight, back, plan, (dy.shape[1], ctx.x_shape[1]), live)
        if ctx.wgrad:
            if plan.saved_input is None:
                x = saved[0]
            else:
                x = gemm.decode_operand(saved, plan.saved_input, ctx.x_shape, 1, dy.dtype)
            dw = gemm.wgrad_gemm(dy, x, plan.wgrad, ctx.weight_dtype, live)
        master = () if plan.stores_codes else (dw,)
        return (dx, None, None, None, None, *master, *([None] * (ctx.num_codes + plan.num_live)))
