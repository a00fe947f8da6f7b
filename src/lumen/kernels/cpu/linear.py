"""A frozen linear layer with its LoRA branch by the C++ kernel: one product forward, one backward, no extra passes.

    h = x Aᵀ,  y = x Wᵀ + s h Bᵀ;   dh = s dy B,  dx = dy W + dh A,  dA = dhᵀ x,  dB = s dyᵀ h

What is fused and how is told in `csrc/linear.cpp`.  The factors A and B are fp32 parameters and get fp32 gradients;
they are rounded to bf16 for the products, whose sums are fp32.  The product with the weight in backward is bf16, or
int8 with the weight's codes (`pack_codes`), which is recipe `int8-backward`: dy is quantised per row as
`quantize_int8` does.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lumen.kernels.cpu.library import Float, Long, Pointer, load, missing, numbers
from lumen.kernels.registry import Kernel, record, register

MOST = 8192
"""Largest input and output size: longer contractions would want blocking along K, which the kernel does not do."""

Codes = tuple[Tensor, Tensor, Tensor]
"""A frozen weight [N, K] in int8 for the input gradient: panels of codes, scale and offset of each column."""


def fits(in_features: int, out_features: int) -> bool:
    """Whether the kernel takes a layer of this size."""
    return in_features % 2 == 0 and out_features % 2 == 0 and 0 < in_features <= MOST and 0 < out_features <= MOST


def pack_codes(codes: Tensor, scale: Tensor) -> Codes:
    """codes [N, K] int8 and scale [1, K] fp32 (W ≈ codes · scale) → what the int8 input gradient reads."""
    rows, columns = codes.shape
    padded = -(-columns // 48) * 48
    panels = torch.empty(padded * (-(-rows // 4) * 4), dtype=torch.int8)
    offset = torch.empty(padded, dtype=torch.int32)
    codes = codes.contiguous()
    run = load().lumen_pack_int8
    run.argtypes = [Pointer, Long, Long, Pointer, Pointer]
    run(codes.data_ptr(), rows, columns, panels.data_ptr(), offset.data_ptr())
    return panels, torch.nn.functional.pad(scale.reshape(-1).float(), (0, padded - columns)), offset


def lora_linear(
    x: Tensor, weight: Tensor, down: Tensor, up: Tensor, scaling: float, codes: Codes | None = None
) -> Tensor:
    """y [M, N] bf16 = x Wᵀ + scaling · (x downᵀ) upᵀ; differentiable in x, down and up.

    x [M, K] and weight [N, K] bf16; down [R, K], up [N, R] fp32.  codes: for the input gradient, instead of the weight.
    """
    panels, scale, offset = codes or (None, None, None)
    y: Tensor = torch.ops.lumen.cpu_lora_linear(x, weight, down, up, scaling, panels, scale, offset)[0]
    return y


def _at(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


def _even(rank: int) -> int:
    return rank + rank % 2


@torch.library.custom_op("lumen::cpu_lora_linear", mutates_args=(), device_types="cpu")
def _forward(
    x: Tensor, weight: Tensor, down: Tensor, up: Tensor, scaling: float,
    panels: Tensor | None, scale: Tensor | None, offset: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    record("lora_linear", "int8" if panels is not None else "bf16", "cpu")
    x, weight, down, up = x.contiguous(), weight.contiguous(), down.contiguous(), up.contiguous()
    (rows, inner), (outer, rank) = x.shape, up.shape
    y = torch.empty(rows, outer, dtype=x.dtype)
    h = torch.empty(rows, _even(rank), dtype=x.dtype)
    run = load().lumen_lora_forward
    run.argtypes = [*[Pointer] * 7, Float]
    run(*(_at(t) for t in (x, weight, down, up, y, h)), numbers([rows, outer, inner, rank]), scaling)
    return y, h


@_forward.register_fake
def _(x: Tensor, weight: Tensor, down: Tensor, up: Tensor, *rest: Any) -> Any:
    return x.new_empty(x.shape[0], up.shape[0]), x.new_empty(x.shape[0], _even(up.shape[1]))


@torch.library.custom_op("lumen::cpu_lora_linear_backward", mutates_args=(), device_types="cpu")
def _backward(
    grad: Tensor, x: Tensor, h: Tensor, weight: Tensor, down: Tensor, up: Tensor, scaling: float,
    panels: Tensor | None, scale: Tensor | None, offset: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    grad, x, h, weight = grad.contiguous(), x.contiguous(), h.contiguous(), weight.contiguous()
    down, up = down.contiguous(), up.contiguous()
    (rows, inner), (outer, rank) = x.shape, up.shape
    d_x = torch.empty(rows, inner, dtype=x.dtype)
    d_down = torch.empty(_even(rank), inner, dtype=torch.float32)
    d_up = torch.empty(_even(rank), outer, dtype=torch.float32)
    if rows == 0:
        return d_x, d_down.zero_()[:rank].clone(), d_up.zero_()[:rank].t().contiguous()
    run = load().lumen_lora_backward
    run.argtypes = [*[Pointer] * 13, Float]
    tensors = (grad, x, h, weight, panels, scale, offset, down, up, d_x, d_down, d_up)
    run(*(_at(t) for t in tensors), numbers([rows, outer, inner, rank]), scaling)
    return d_x, d_down if rank == len(d_down) else d_down[:rank].clone(), d_up[:rank].t().contiguous()


@_backward.register_fake
def _(grad: Tensor, x: Tensor, h: Tensor, weight: Tensor, down: Tensor, up: Tensor, *rest: Any) -> Any:
    return x.new_empty(x.shape), down.new_empty(down.shape), up.new_empty(up.shape)


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    x, weight, down, up, ctx.scaling, *codes = inputs
    ctx.save_for_backward(x, output[1], weight, down, up, *(c for c in codes if c is not None))
    ctx.mark_non_differentiable(output[1])


def _differentiate(ctx: Any, grad: Tensor, _: Any) -> Any:
    x, h, weight, down, up, *codes = ctx.saved_tensors
    grads = torch.ops.lumen.cpu_lora_linear_backward(
        grad, x, h, weight, down, up, ctx.scaling, *(codes or (None, None, None))
    )
    return grads[0], None, grads[1], grads[2], None, None, None, None


torch.library.register_autograd("lumen::cpu_lora_linear", _differentiate, setup_context=_keep)

register(
    Kernel(
        "lora_linear", "cpu", ("cpu",), ("bf16", "int8"), 20, "native",
        "C++ on AVX512: weight, LoRA branch and rounding in one product; int8: the input gradient by VNNI",
        lora_linear, missing,
    )
)  # fmt: skip
