"""Fake quantisation, written a second time: x → the values that a format would hold, in plain torch.

This file and `independent.py` are the yardstick of the loss-gap table, so they share no code with `lumen.formats` or
`lumen.quant` (a test reads their imports).  They follow the definitions by another way wherever there is one: powers of
two by frexp instead of by bits, E2M1 by rounding halves and doubles instead of by a grid, FP8 by torch's own cast, the
GGUF grids by the `gguf` package, stochastic rounding from torch's generator.

Every function takes a matrix [R, C] whose scales run along C (the dimension that a product contracts over) and returns
fp32 values of the same shape.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import pad

Fake = Callable[[Tensor], Tensor]


def _divisor(scale: Tensor) -> Tensor:
    """Nothing but zeros in a group: any scale will do, but 0."""
    return torch.where(scale == 0, 1.0, scale)


def _in_blocks(x: Tensor, width: int, quantise: Callable[[Tensor], Tensor]) -> Tensor:
    """`quantise` over [R, blocks, width]; the last block is filled with zeros."""
    rows, cols = x.shape
    blocks = pad(x.float(), (0, -cols % width)).view(rows, -1, width)
    return quantise(blocks).reshape(rows, -1)[:, :cols]


def _power_of_two_above(x: Tensor) -> Tensor:
    """The smallest power of two that is at least x, as its exponent; x > 0."""
    mantissa, exponent = torch.frexp(x)  # x = mantissa · 2^exponent with mantissa in [0.5, 1)
    return torch.where(mantissa == 0.5, exponent - 1, exponent)


# integers


def int8_row(x: Tensor) -> Tensor:
    x = x.float()
    scale = _divisor(x.abs().amax(1, keepdim=True) / 127)
    return (x / scale).round().clamp(-127, 127) * scale


def int4_group128(x: Tensor) -> Tensor:
    def group(b: Tensor) -> Tensor:
        scale = _divisor(b.abs().amax(2, keepdim=True) / 7)
        return (b / scale).round().clamp(-7, 7) * scale

    return _in_blocks(x, 128, group)


def ternary(x: Tensor) -> Tensor:
    """BitNet b1.58's weight: the mean magnitude times -1, 0 or 1."""
    x = x.float()
    scale = _divisor(x.abs().mean())
    return (x / scale).round().clamp(-1, 1) * scale


# FP8


def fp8_scaled(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """fp32 x in an FP8 type with a given scale; saturates."""
    top = torch.finfo(dtype).max
    return (x / scale).clamp(-top, top).to(dtype).float() * scale


def fp8_tensor(x: Tensor, dtype: torch.dtype = torch.float8_e4m3fn) -> Tensor:
    x = x.float()
    return fp8_scaled(x, _divisor(x.abs().max() / torch.finfo(dtype).max), dtype)


def e5m2_tensor(x: Tensor) -> Tensor:
    return fp8_tensor(x, torch.float8_e5m2)


def e4m3_row_pow2(x: Tensor) -> Tensor:
    x = x.float()
    wanted = _divisor(x.abs().amax(1, keepdim=True) / 448)
    return fp8_scaled(x, torch.ldexp(torch.ones_like(wanted), _power_of_two_above(wanted)), torch.float8_e4m3fn)


def e4m3_1x128(x: Tensor) -> Tensor:
    return _in_blocks(
        x, 128, lambda b: fp8_scaled(b, _divisor(b.abs().amax(2, keepdim=True) / 448), torch.float8_e4m3fn)
    )  # fmt: skip


def e4m3_128x128(x: Tensor) -> Tensor:
    rows, cols = x.shape
    full = pad(x.float(), (0, -cols % 128, 0, -rows % 128))
    tiles = full.unfold(0, 128, 128).unfold(1, 128, 128)  # [tiles down, tiles across, 128, 128]
    scale = _divisor(tiles.abs().amax((2, 3)) / 448).repeat_interleave(128, 0).repeat_interleave(128, 1)
    return fp8_scaled(full, scale, torch.float8_e4m3fn)[:rows, :cols]


# MX: blocks of 32, scales that are powers of two


def mxfp8(x: Tensor) -> Tensor:
    def block(b: Tensor) -> Tensor:
        amax = b.abs().amax(2, keepdim=True)
        exponent = _power_of_two_above(_divisor(amax / 448)).clamp(-127, 127)
        scale = torch.ldexp(torch.ones_like(amax), exponent)
        return (b / scale).to(torch.float8_e4m3fn).float() * scale * (amax > 0)

    return _in_blocks(x, 32, block)


def _e2m1(u: Tensor) -> Tensor:
    """Nearest of 0 .5 1 1.5 2 3 4 6, ties to even codes: the spacing is ½ below 2, 1 below 4, 2 above."""
    size = u.abs()
    fine, middle, coarse = (size * 2).round() / 2, size.round(), ((size / 2).round() * 2).clamp_max(6)
    return torch.where(size < 2, fine, torch.where(size < 4, middle, coarse)) * u.sign()


def _e2m1_stochastic(u: Tensor, generator: torch.Generator) -> Tensor:
    size = u.abs().clamp_max(6)
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    low = (size / step).floor() * step
    up = torch.rand(u.shape, generator=generator) < (size - low) / step
    return (low + up * step) * u.sign()


def mxfp4_even(x: Tensor) -> Tensor:
    def block(b: Tensor) -> Tensor:
        amax = b.abs().amax(2, keepdim=True)
        mantissa, exponent = torch.frexp(_divisor(amax))
        # 2·mantissa in [1, 2) is rounded to one bit: from 1.75 on it becomes the next power of two
        exponent = exponent - 1 + (2 * mantissa >= 1.75) - 2
        scale = torch.ldexp(torch.ones_like(amax), exponent.clamp(-127, 127))
        return _e2m1(b / scale) * scale * (amax > 0)

    return _in_blocks(x, 32, block)


def mxfp4_stochastic(x: Tensor, generator: torch.Generator) -> Tensor:
    def block(b: Tensor) -> Tensor:
        amax = b.abs().amax(2, keepdim=True)
        exponent = _power_of_two_above(_divisor(amax / 6)).clamp(-127, 127)
        scale = torch.ldexp(torch.ones_like(amax), exponent)
        return _e2m1_stochastic(b / scale, generator) * scale * (amax > 0)

    return _in_blocks(x, 32, block)


def rotated(fake: Fake, width: int = 16) -> Fake:
    """`fake` between a randomised Hadamard transform of `width` neighbours and its inverse."""
    signs = torch.randint(0, 2, (width,), generator=torch.Generator().manual_seed(width)) * 2.0 - 1
    index = torch.arange(width)
    both = index[:, None] & index[None, :]
    parity = sum((both >> bit) & 1 for bit in range(width.bit_length()))
    matrix = signs[:, None] * torch.where(torch.as_tensor(parity) % 2 == 0, 1.0, -1.0) / width**0.5

    def run(x: Tensor) -> Tensor:
        turned = _in_blocks(pad(x.float(), (0, -x.shape[1] % width)), width, lambda b: b @ matrix)
        return _in_blocks(fake(turned), width, lambda b: b @ matrix.t())[:, : x.shape[1]]

    return run


# tables and GGUF grids

_NF4 = (
    -1, -.6961928, -.52507305, -.39491749, -.28444138, -.18477343, -.09105004, 0,
    .0795803, .1609302, .2461123, .33791524, .44070983, .562617, .72295684, 1,
)  # fmt: skip


def _nearest_entry(x: Tensor, table: Tensor) -> Tensor:
    """The entry of an ascending table that is nearest."""
    above = torch.searchsorted(table, x.contiguous()).clamp(1, len(table) - 1)
    low, high = table[above - 1], table[above]
    return torch.where(x - low <= high - x, low, high)


def _dynamic_map() -> Tensor:
    values = [0.0, 1.0]
    for i in range(7):
        edges = torch.linspace(0.1, 1, 2**i + 1)
        middles = (edges[1:] + edges[:-1]) / 2 * 10.0 ** (i - 6)
        values += [*middles.tolist(), *(-middles).tolist()]
    return torch.tensor(sorted(values))


def nf4_double(x: Tensor) -> Tensor:
    """QLoRA's storage: blocks of 64 over the flattened matrix, their magnitudes in the 8-bit dynamic map."""
    flat = x.float().flatten()
    blocks = pad(flat, (0, -len(flat) % 64)).view(-1, 64)
    amax = blocks.abs().amax(1)
    mean = amax.mean()
    outer = pad(amax - mean, (0, -len(amax) % 256)).view(-1, 256)
    top = _divisor(outer.abs().amax(1, keepdim=True))
    stored = (_nearest_entry(outer / top, _dynamic_map()) * top).flatten()[: len(amax)] + mean
    table = torch.tensor(_NF4, dtype=torch.float32)
    values = _nearest_entry(blocks / _divisor(amax)[:, None], table) * stored[:, None]
    return values.flatten()[: len(flat)].view(x.shape)


def _gguf(x: Tensor, kind: str) -> Tensor:
    import gguf

    name = gguf.GGMLQuantizationType[kind]
    array = x.detach().float().contiguous().numpy()
    return torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(array, name), name).reshape(array.shape))


def q8_0(x: Tensor) -> Tensor:
    return _gguf(x, "Q8_0")


def q4_0(x: Tensor) -> Tensor:
    return _gguf(x, "Q4_0")
