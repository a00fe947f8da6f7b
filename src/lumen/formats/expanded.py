"""E4M3 with range expansion, for optimizer states (COAT, arXiv 2410.19313).

A group of moments spans far fewer spans than E4M3 does, so much of the format goes unused.  Raising magnitudes to a
power k stretches their logarithms over the whole format:

    k = ln R / ln(max / min)         over the group's non-zero values, R = 448² / 2 the ratio that the format spans
    y = sign(x) · (|x| / c)^k        c = √(max · min), so that the stretched range lies around 1
    stored: y / s in E4M3 with s = max|y| / 448, and k, s, c in bf16;   x ≈ sign(y) · |y·s|^(1/k) · c

Zeros stay zero.  A group of one magnitude has nothing to stretch: k = 1.  k is at most 4096: as c is rounded to bf16,
a group of nearly one magnitude would otherwise be stretched beyond fp32.  What a group spans is the difference of two
logarithms, as the ratio of its ends would overflow; fp32's own subnormals count as its smallest normal number.
"""

from __future__ import annotations

import math

import torch

from lumen.formats.base import Codec, Request, Scales, Shape
from lumen.formats.floats import GRIDS, float_codes
from lumen.formats.groups import flat_blocks
from lumen.formats.scales import check_finite
from lumen.formats.spec import QuantSpec

_MAX = GRIDS["e4m3", "ocp"].max
_SPAN = math.log(_MAX**2 / 2)
_LARGEST_POWER = 4096.0
_TINY = torch.finfo(torch.float32).tiny  # bf16's too


def _encode(x: torch.Tensor, spec: QuantSpec, ask: Request) -> tuple[torch.Tensor, Scales]:
    blocks = flat_blocks(x.float(), spec.granularity.cols)
    size = blocks.abs()
    high = size.amax(1) if x.numel() else size.new_zeros(0)
    check_finite(high, ask.nonfinite, ask.name)
    low = torch.where(size > 0, size, torch.inf).amin(1) if x.numel() else high
    empty = high == 0
    high, low = (torch.where(empty, 1.0, end.clamp_min(_TINY)) for end in (high, low))
    spans = torch.log(high) - torch.log(low)
    power = torch.where(spans > 0, (_SPAN / spans).clamp_max(_LARGEST_POWER), 1.0).to(torch.bfloat16)
    centre = (high.sqrt() * low.sqrt()).to(torch.bfloat16)
    stretched = (size / centre.float()[:, None]) ** power.float()[:, None]
    stretched = torch.where(size > 0, stretched, 0.0)
    scale = stretched.amax(1) / _MAX if x.numel() else high
    scale = torch.where(empty | (scale < _TINY), 1.0, scale)
    scale = torch.where(torch.isfinite(high), scale, torch.nan).to(torch.bfloat16)
    units = torch.sign(blocks) * stretched / scale.float()[:, None]
    codes = float_codes(units.clamp(-_MAX, _MAX), GRIDS["e4m3", "ocp"]).reshape(-1)[: x.numel()]
    return codes.reshape(x.shape), {"scale": scale, "power": power, "centre": centre}


def _decode(codes: torch.Tensor, scales: Scales, spec: QuantSpec, shape: Shape) -> torch.Tensor:
    blocks = flat_blocks(codes.float(), spec.granularity.cols)
    scale, power, centre = (scales[name].float()[:, None] for name in ("scale", "power", "centre"))
    size = (blocks.abs() * scale) ** (1 / power) * centre
    flat = torch.where(blocks == 0, 0.0, torch.sign(blocks) * size).reshape(-1)
    return flat[: torch.Size(shape).numel()].reshape(shape)


EXPANDED = Codec(_encode, _decode, lambda spec: ("scale", "power", "centre"), overhead=lambda spec: 48.0)
