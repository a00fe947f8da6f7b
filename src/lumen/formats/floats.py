"""Small floating-point grids: E4M3, E5M2, E3M2, E2M3, E2M1.

A number is sign · 2^(e - bias) · (1 + m/2^M) with E exponent bits and M mantissa bits; exponent field 0 holds the
subnormals, 2^(1 - bias) · m/2^M.  So near a value with exponent e the grid's step is 2^(e - M), below the smallest
normal it stays 2^(emin - M), and rounding to the grid is rounding y / step to an integer:

    nearest      round(y / step) · step, ties to even: even codes, as neighbouring codes differ in the last bit of m
    stochastic   floor(y / step + U[0, 1)) · step: up with probability (y - lo)/(hi - lo)

Every step is a power of two, so both are exact.  Values beyond the largest are clamped to it (a plain cast is not safe:
FNUZ turns them into NaN, and infinity into 448 hides an overflow); NaN stays NaN.

| | bias | max | smallest normal | smallest subnormal |
| --- | --- | --- | --- | --- |
| E4M3 (OCP) | 7 | 448 | 2^-6 | 2^-9 |
| E4M3 FNUZ (gfx942) | 8 | 240 | 2^-7 | 2^-10 |
| E5M2 (OCP) | 15 | 57344 | 2^-14 | 2^-16 |
| E5M2 FNUZ | 16 | 57344 | 2^-15 | 2^-17 |
| E3M2 | 3 | 28 | 2^-2 | 2^-4 |
| E2M3 | 1 | 7.5 | 1 | 2^-3 |
| E2M1 | 1 | 6 | 1 | 2^-1 |

The same bits mean twice as much in OCP as in FNUZ.  Stored codes are OCP on every chip; `ocp_to_fnuz` makes the
transient operand that gfx942's matrix units read.  Source: OCP 8-bit Floating Point v1.0, OCP Microscaling v1.0.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch

from lumen.core import QuantError


@dataclass(frozen=True)
class MiniFloat:
    """dtype: torch's own type where there is one; its codes are stored in it, others as bytes with the sign on top."""

    name: str
    ebits: int
    mbits: int
    bias: int
    max: float
    dtype: torch.dtype | None = None

    @property
    def bits(self) -> int:
        return 1 + self.ebits + self.mbits

    @property
    def emin(self) -> int:
        """Exponent of the smallest normal number."""
        return 1 - self.bias

    @property
    def emax(self) -> int:
        """Exponent of the largest number."""
        return math.frexp(self.max)[1] - 1


def _from_torch(name: str, ebits: int, mbits: int, bias: int, dtype: torch.dtype) -> MiniFloat:
    return MiniFloat(name, ebits, mbits, bias, torch.finfo(dtype).max, dtype)


GRIDS: dict[tuple[str, str], MiniFloat] = {
    ("e4m3", "ocp"): _from_torch("e4m3", 4, 3, 7, torch.float8_e4m3fn),
    ("e4m3", "fnuz"): _from_torch("e4m3", 4, 3, 8, torch.float8_e4m3fnuz),
    ("e5m2", "ocp"): _from_torch("e5m2", 5, 2, 15, torch.float8_e5m2),
    ("e5m2", "fnuz"): _from_torch("e5m2", 5, 2, 16, torch.float8_e5m2fnuz),
    ("e3m2", "ocp"): MiniFloat("e3m2", 3, 2, 3, 28.0),
    ("e2m3", "ocp"): MiniFloat("e2m3", 2, 3, 1, 7.5),
    ("e2m1", "ocp"): MiniFloat("e2m1", 2, 1, 1, 6.0),
}
"""(element, dialect) → grid."""


def floor_log2(x: torch.Tensor) -> torch.Tensor:
    """int32 exponent of fp32 x > 0, read from its bits (exact; -127 for zero and for fp32's own subnormals)."""
    return ((x.contiguous().view(torch.int32) >> 23) & 0xFF) - 127


def exp2_int(e: torch.Tensor) -> torch.Tensor:
    """fp32 2^e for int32 e in [-127, 127], made from its bits (exact; a library's exp2 need not be)."""
    return torch.where(e == -127, 1 << 22, (e + 127) << 23).to(torch.int32).view(torch.float32)


def round_to_grid(y: torch.Tensor, grid: MiniFloat, uniform: torch.Tensor | None = None) -> torch.Tensor:
    """fp32 y → the nearest (or with `uniform` in [0, 1) the stochastically chosen) value of the grid, fp32."""
    step = exp2_int((floor_log2(y).clamp_min(grid.emin) - grid.mbits).clamp(-127, 127))
    units = y / step
    rounded = torch.round(units) if uniform is None else torch.floor(units + uniform)
    return (rounded * step).clamp(-grid.max, grid.max)


def float_codes(values: torch.Tensor, grid: MiniFloat) -> torch.Tensor:
    """Values of the grid (fp32) → codes: torch's own type, or uint8 bit patterns."""
    if grid.dtype is not None:
        return values.to(grid.dtype)
    size = values.abs()
    exponent = floor_log2(size).clamp_min(grid.emin)
    mantissa = size / exp2_int(exponent - grid.mbits)  # 2^M + m for normal numbers, m below
    normal = mantissa >= 2**grid.mbits
    field = torch.where(normal, exponent - grid.emin + 1, 0)
    low = torch.where(normal, mantissa - 2**grid.mbits, mantissa)
    sign = torch.signbit(values).to(torch.int32) << (grid.bits - 1)
    return (sign | (field << grid.mbits) | low.nan_to_num().to(torch.int32)).to(torch.uint8)


@functools.cache
def _table(grid: MiniFloat) -> tuple[float, ...]:
    """The value of every bit pattern of a grid that torch has no type for."""
    values = []
    for code in range(2**grid.bits):
        field, low = (code >> grid.mbits) & (2**grid.ebits - 1), code & (2**grid.mbits - 1)
        size = 2.0**grid.emin * low / 2**grid.mbits
        if field:
            size = 2.0 ** (field - grid.bias) * (1 + low / 2**grid.mbits)
        values.append(-size if code >> (grid.bits - 1) else size)
    return tuple(values)


def float_values(codes: torch.Tensor, grid: MiniFloat) -> torch.Tensor:
    """Codes → fp32 values."""
    if grid.dtype is not None:
        return codes.float()
    return torch.tensor(_table(grid), device=codes.device)[codes.long()]


def ocp_to_fnuz(codes: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Stored OCP codes as gfx942 reads them: the same bits, twice the scale, and -0 as 0 (0x80 is FNUZ's NaN).

    Exact.  Raises QuantError for NaN and infinity, whose bits are numbers in FNUZ.
    """
    kinds = {torch.float8_e4m3fn: torch.float8_e4m3fnuz, torch.float8_e5m2: torch.float8_e5m2fnuz}
    if codes.dtype not in kinds:
        raise QuantError(f"{codes.dtype} holds no OCP FP8 codes")
    if not bool(torch.isfinite(codes.float()).all()):
        raise QuantError("these codes hold NaN or infinity, which FNUZ would read as numbers")
    bits = codes.view(torch.uint8)
    return torch.where(bits == 0x80, 0, bits).to(torch.uint8).view(kinds[codes.dtype]), scale * 2


def fnuz_to_ocp(codes: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Transient FNUZ codes in OCP values, exactly where OCP has the bits: the same bits with half the scale.

    Raises QuantError for 0x80 (NaN) and for bits that are NaN or infinity in OCP (E4M3 0x7F, E5M2 0x7C and above).
    """
    kinds = {torch.float8_e4m3fnuz: torch.float8_e4m3fn, torch.float8_e5m2fnuz: torch.float8_e5m2}
    if codes.dtype not in kinds:
        raise QuantError(f"{codes.dtype} holds no FNUZ codes")
    bits = codes.view(torch.uint8)
    out = bits.view(kinds[codes.dtype])
    if bool((bits == 0x80).any()) or not bool(torch.isfinite(out.float()).all()):
        raise QuantError("these codes have no OCP twin: requantise the values instead")
    return out, scale / 2
