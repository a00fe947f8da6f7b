"""One fp32 scale per group and an evenly or logarithmically spaced grid: INT8, INT4, ternary, E4M3, E5M2.

    code = round(x / scale) on the grid          x ≈ code · scale

Ternary (BitNet b1.58, arXiv 2402.17764) takes the *mean* magnitude as scale and keeps -1, 0, 1: a large value is
clipped, which costs less than a scale so large that most values round to 0.  INT4 codes are stored plus 8, low nibble
first (compressed-tensors' order); ternary codes plus 1, four to a byte.
"""

from __future__ import annotations

import torch

from lumen.formats.base import Codec, Request, Scales, Shape
from lumen.formats.floats import GRIDS, float_codes, round_to_grid
from lumen.formats.groups import group_amax, group_mean_abs, spread
from lumen.formats.integer import MAX, decode_integer, encode_integer
from lumen.formats.packing import pack, unpack
from lumen.formats.scales import absmax_scale, check_finite, check_scale
from lumen.formats.spec import QuantSpec

_OFFSET = {"int4": 8, "ternary": 1}


def _scale(x: torch.Tensor, spec: QuantSpec, type_max: float, ask: Request) -> torch.Tensor:
    if ask.scale is not None:
        return ask.scale.to(ask.scale_dtype)
    amax = group_amax(x, spec.granularity)
    check_finite(amax, ask.nonfinite, ask.name)
    scale = absmax_scale(amax, type_max, rule=spec.rule, storage=ask.scale_dtype)
    check_scale(scale, ask.nonfinite, ask.name)
    return scale


def _encode_integer(x: torch.Tensor, spec: QuantSpec, ask: Request) -> tuple[torch.Tensor, Scales]:
    largest = MAX[spec.element]
    scale = _scale(x, spec, largest, ask)
    codes = encode_integer(x, scale, spec.granularity, largest, ask.noise)
    if spec.element == "int4":
        codes = pack((codes + 8).to(torch.uint8), 4)
    return codes, {"scale": scale}


def _decode_integer(codes: torch.Tensor, scales: Scales, spec: QuantSpec, shape: Shape) -> torch.Tensor:
    if spec.element in _OFFSET:
        codes = _unpacked(codes, spec, shape)
    return decode_integer(codes.reshape(shape), scales["scale"], spec.granularity)


def _unpacked(codes: torch.Tensor, spec: QuantSpec, shape: Shape) -> torch.Tensor:
    count = shape[-1] if len(shape) else 1
    return unpack(codes, spec.format.bits, count).to(torch.int8) - _OFFSET[spec.element]


def _encode_ternary(x: torch.Tensor, spec: QuantSpec, ask: Request) -> tuple[torch.Tensor, Scales]:
    mean = group_mean_abs(x, spec.granularity)
    check_finite(mean, ask.nonfinite, ask.name)
    scale = absmax_scale(mean, 1.0, storage=ask.scale_dtype)
    check_scale(scale, ask.nonfinite, ask.name)
    codes = encode_integer(x, scale, spec.granularity, 1)
    return pack((codes + 1).to(torch.uint8), 2), {"scale": scale}


def _encode_float(x: torch.Tensor, spec: QuantSpec, ask: Request) -> tuple[torch.Tensor, Scales]:
    grid = GRIDS[spec.element, spec.dialect]
    scale = _scale(x, spec, grid.max, ask)
    units = x.float() / spread(scale.float(), x.shape, spec.granularity)
    if ask.noise is not None:
        units = round_to_grid(units, grid, ask.noise.uniform(units.shape, units.device))
    return float_codes(units.clamp(-grid.max, grid.max), grid), {"scale": scale}


def _decode_float(codes: torch.Tensor, scales: Scales, spec: QuantSpec, shape: Shape) -> torch.Tensor:
    return codes.float().reshape(shape) * spread(scales["scale"].float(), shape, spec.granularity)


INTEGER = Codec(_encode_integer, _decode_integer)
TERNARY = Codec(_encode_ternary, _decode_integer)
FLOAT = Codec(_encode_float, _decode_float)
