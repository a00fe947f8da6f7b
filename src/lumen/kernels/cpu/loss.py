"""Cross-entropy of a bf16 linear head by the C++ kernel: no fp32 logits, a chunk of rows at a time.

`csrc/loss.cpp` tells how; `objectives.linear_cross_entropy` defines the result and calls this where it can.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lumen.kernels.cpu.library import Float, Pointer, load, missing, numbers
from lumen.kernels.registry import Kernel, record, register

PADDING = 96
"""Columns between rows of logits, so that rows of 2ⁿ words do not meet in the same sets of the cache."""


_room = torch.empty(0, dtype=torch.bfloat16)


def _logits(rows: int, stride: int) -> Tensor:
    """Room for a chunk's logits, kept from step to step: making its pages anew costs 2 % of a small step."""
    global _room
    if _room.numel() < rows * stride:
        _room = torch.empty(rows * stride, dtype=torch.bfloat16)
    return _room


def fits(hidden: Tensor, weight: Tensor, scale: float) -> bool:
    """Whether the kernel takes this head: bf16 on a CPU, even sizes, a positive scale."""
    even = weight.shape[0] % 2 == 0 and weight.shape[1] % 2 == 0
    right = hidden.device.type == "cpu" and hidden.dtype == weight.dtype == torch.bfloat16
    return right and even and scale > 0 and not missing()


def linear_loss(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, scale: float, gradient: bool, rows: int
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Loss sum (fp32), rows right (int64), and the loss's gradient in hidden [N, D] (bf16; None where not wanted).

    hidden [N, D], weight [V, D] bf16; targets [N] int64 in [0, V).  rows: whose logits exist at one time.
    """
    record("linear_loss", "bf16", "cpu")
    hidden, weight, targets = hidden.contiguous(), weight.contiguous(), targets.contiguous()
    (count, size), words = hidden.shape, weight.shape[0]
    assert int(targets.min()) >= 0 and int(targets.max()) < words
    stride, chunk = words + PADDING, min(rows, count)
    logits = _logits(chunk, stride)
    sums = torch.empty(chunk if gradient else 0, -(-size // 48) * 48)
    losses, right = torch.empty(count), torch.empty(count, dtype=torch.int64)
    d_hidden = torch.empty_like(hidden) if gradient else None
    run = load().lumen_linear_loss
    run.argtypes = [*[Pointer] * 9, Float]
    for start in range(0, count, chunk):
        part = slice(start, start + chunk)
        out = 0 if d_hidden is None else d_hidden[part].data_ptr()
        run(
            hidden[part].data_ptr(), weight.data_ptr(), targets[part].data_ptr(), logits.data_ptr(), sums.data_ptr(),
            losses[part].data_ptr(), right[part].data_ptr(), out,
            numbers([min(chunk, count - start), words, size, stride]), scale,
        )  # fmt: skip
    return losses.sum(), right.sum(), d_hidden


register(
    Kernel(
        "linear_loss", "cpu", ("cpu",), ("bf16",), 20, "native",
        "C++ on AVX512-BF16: head, softmax and gradient of labelled rows; logits in bf16 only, a chunk at a time",
        linear_loss, missing,
    )
)  # fmt: skip
