"""Fake quantisation written from the definitions with torch alone: what quantised training is compared with.

Nothing of Lumen is used here.  `fake_quantise(model, scheme)` exchanges nn.Linear layers (the head stays) for layers
that round each operand of their three products and multiply in fp32:

    int8   symmetric absmax / 127, a scale per index that is not contracted; weights requantised for each product
    fp8    absmax / max of the type, a scale per tensor; E4M3 for weight and input, E5M2 for the output's gradient
    nf4    the weight alone: blocks of 64, absmax in dynamic 8-bit codes of blocks of 256 around their mean
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

NF4 = torch.tensor(
    [-1, -0.6961928, -0.52507305, -0.39491749, -0.28444138, -0.18477343, -0.09105004, 0, 0.0795803, 0.1609302,
     0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1]
)  # fmt: skip


def int8(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Round trip with one scale per slice along `dim`."""
    scale = x.float().abs().amax(dim, keepdim=True) / 127
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    return torch.round(x.float() / scale) * scale


def fp8(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Round trip with one scale for the tensor."""
    scale = x.float().abs().amax() / torch.finfo(dtype).max
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    return (x.float() / scale).to(dtype).float() * scale


def dynamic8() -> torch.Tensor:
    """The signed dynamic 8-bit map: 256 values."""
    values = [torch.zeros(1), torch.ones(1)]
    for i in range(7):
        edges = torch.linspace(0.1, 1, 2**i + 1)
        middle = (edges[1:] + edges[:-1]) / 2 * 10.0 ** (i - 6)
        values += [middle, -middle]
    return torch.cat(values).sort().values


def _nearest(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    return table[(x.reshape(-1, 1) - table).abs().argmin(1)].reshape(x.shape)


def _blocks(x: torch.Tensor, size: int, table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x as blocks [·, size] of table values, and their absmax."""
    rows = torch.nn.functional.pad(x.reshape(-1), (0, -x.numel() % size)).reshape(-1, size)
    absmax = rows.abs().amax(1)
    return _nearest(rows / absmax.clamp_min(1e-30)[:, None], table), absmax


def nf4(weight: torch.Tensor) -> torch.Tensor:
    """Round trip of a weight through NF4 with double quantisation."""
    codes, absmax = _blocks(weight.float(), 64, NF4)
    offset = absmax.mean()
    inner, outer = _blocks(absmax - offset, 256, dynamic8())
    absmax = (inner * outer[:, None]).reshape(-1)[: absmax.numel()] + offset
    return (codes * absmax[:, None]).reshape(-1)[: weight.numel()].reshape(weight.shape).to(weight.dtype)


class _Products(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, scheme: str) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.scheme = scheme
        left, right = _pair(scheme, x, weight, 1, 1)
        return (left @ right.t()).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        (dy,), (x, weight) = grads, ctx.saved_tensors
        if ctx.scheme == "int8":
            dx = int8(dy, 1) @ int8(weight, 0)
            dw = int8(dy, 0).t() @ int8(x, 0)
        else:
            low = fp8(dy, torch.float8_e5m2)
            dx, dw = low @ fp8(weight, torch.float8_e4m3fn), low.t() @ fp8(x, torch.float8_e4m3fn)
        return dx.to(dy.dtype), dw.to(weight.dtype), None


def _pair(scheme: str, x: torch.Tensor, w: torch.Tensor, x_dim: int, w_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    if scheme == "int8":
        return int8(x, x_dim), int8(w, w_dim)
    return fp8(x, torch.float8_e4m3fn), fp8(w, torch.float8_e4m3fn)


class FakeLinear(nn.Linear):
    """nn.Linear with rounded operands; casts its input inside autocast as nn.Linear does."""

    scheme = "int8"

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        x = input.to(torch.get_autocast_dtype("cpu")) if torch.is_autocast_enabled("cpu") else input
        y = _Products.apply(x.reshape(-1, x.shape[-1]), self.weight, self.scheme)
        y = y.reshape(*x.shape[:-1], -1)
        return y if self.bias is None else y + self.bias.to(y.dtype)


def fake_quantise(model: nn.Module, scheme: str) -> nn.Module:
    """Exchange every nn.Linear but `lm_head`, in place; `nf4` rounds and freezes the weights instead."""
    for name, module in model.named_modules():
        if type(module) is not nn.Linear or name.endswith("lm_head"):
            continue
        if scheme == "nf4":
            module.weight.data = nf4(module.weight.data)
            module.weight.requires_grad_(False)
        else:
            module.__class__ = FakeLinear
            module.scheme = scheme
    return model
