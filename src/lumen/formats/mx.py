"""MX, the OCP microscaling formats: blocks of 32 along the contraction dimension share a power of two.

The shared scale is E8M0: byte e means 2^(e - 127), 0xFF is NaN.  It costs 8 bits for 32 values and multiplying by it is
exact; the price is that a block's largest value rarely meets the largest element.  Four rules choose the exponent from
the block's amax (emax is the exponent of the element's largest value, max that value):

    floor   floor(log2 amax) - emax: the specification's; values between max and 2^(emax + 1) saturate
    ceil    ceil(log2 amax) - emax: never saturates, wastes up to half of the range
    rceil   ceil(log2(amax / max)): the smallest exponent that never saturates; MXFP8's default
    even    floor, after rounding amax to the element's mantissa: what saturates is what would have rounded up anyway;
            MXFP4's default

A block that holds NaN or infinity gets 0xFF, so it comes back as NaN; a block of zeros gets byte 0.
Source: OCP Microscaling Formats v1.0.
"""

from __future__ import annotations

import torch

from lumen.formats.base import Codec, Request, Scales, Shape
from lumen.formats.floats import GRIDS, MiniFloat, exp2_int, float_codes, float_values, floor_log2, round_to_grid
from lumen.formats.groups import group_amax, spread
from lumen.formats.packing import pack, unpack
from lumen.formats.scales import check_finite
from lumen.formats.spec import QuantSpec

_MANTISSA = (1 << 23) - 1


def grid_of(spec: QuantSpec) -> MiniFloat:
    """`mxfp8_e4m3` → E4M3, `mxfp4` → E2M1."""
    name = spec.element.partition("_")[2] or "e2m1"
    return GRIDS[name, "ocp"]


def shared_exponent(amax: torch.Tensor, grid: MiniFloat, rule: str) -> torch.Tensor:
    """fp32 amax [blocks] → E8M0 bytes (uint8)."""
    amax = amax.float().contiguous()
    if rule == "floor":
        e = floor_log2(amax) - grid.emax
    elif rule == "ceil":
        e = _ceil_log2(amax) - grid.emax
    elif rule == "rceil":
        e = _ceil_log2(amax / grid.max)
    else:
        bits = amax.view(torch.int32) + (1 << (23 - grid.mbits - 1))
        e = ((bits >> 23) & 0xFF) - 127 - grid.emax
    byte = (e + 127).clamp(0, 254)
    byte = torch.where(amax == 0, 0, byte)
    return torch.where(torch.isfinite(amax), byte, 0xFF).to(torch.uint8)


def _ceil_log2(x: torch.Tensor) -> torch.Tensor:
    """Exact for normal numbers; fp32's own subnormals up to 2^-127, the least scale, count as it."""
    bits = x.view(torch.int32)
    return floor_log2(x) + (((bits & _MANTISSA) != 0) & (bits > 1 << 22)).to(torch.int32)


def e8m0_values(byte: torch.Tensor) -> torch.Tensor:
    """E8M0 bytes → fp32 powers of two; 0xFF → NaN."""
    values = exp2_int(byte.to(torch.int32).clamp_max(254) - 127)
    return torch.where(byte == 0xFF, torch.nan, values)


def _encode(x: torch.Tensor, spec: QuantSpec, ask: Request) -> tuple[torch.Tensor, Scales]:
    grid = grid_of(spec)
    amax = group_amax(x, spec.granularity)
    check_finite(amax, ask.nonfinite, ask.name)
    byte = shared_exponent(amax, grid, spec.rule)
    units = x.float() / spread(e8m0_values(byte), x.shape, spec.granularity)
    uniform = None if ask.noise is None else ask.noise.uniform(units.shape, units.device)
    codes = float_codes(round_to_grid(units, grid, uniform), grid)
    return (codes if grid.dtype is not None else pack(codes, grid.bits)), {"scale": byte}


def _decode(codes: torch.Tensor, scales: Scales, spec: QuantSpec, shape: Shape) -> torch.Tensor:
    grid = grid_of(spec)
    if grid.dtype is None:
        codes = unpack(codes, grid.bits, shape[-1] if len(shape) else 1)
    values = float_values(codes, grid).reshape(shape)
    return values * spread(e8m0_values(scales["scale"]), shape, spec.granularity)


MX = Codec(_encode, _decode, overhead=lambda spec: 8.0)
