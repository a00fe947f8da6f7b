"""Against torchao: FP8 with every granularity and both dialects, and the MX formats under all four scale rules."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from lumen.bench.numerics.equality import Comparison, differing, hard, quiet, total
from lumen.formats import QuantSpec, decode, encode
from lumen.formats.floats import GRIDS, float_codes, round_to_grid
from lumen.formats.packing import unpack

_GRANULARITIES = {"tensor": (64, 512), "row": (1, 512), "1x128": (1, 128), "32x128": (32, 128)}
_MX = ("mxfp8_e4m3", "mxfp8_e5m2", "mxfp6_e3m2", "mxfp6_e2m3", "mxfp4")
_RULES = ("floor", "ceil", "even", "rceil")


def comparisons() -> Iterator[Comparison]:
    for element in ("e4m3", "e5m2"):
        for dialect in ("", "+fnuz"):
            name = f"{element}{dialect}: scales, codes, decodes; tensor, row, block, tile"
            yield Comparison("torchao", name, partial(_float8, element, dialect))
    for element in _MX:
        for rule in _RULES:
            yield Comparison("torchao", f"{element}:{rule}: scales, codes", partial(_mx, element, rule))


def _float8(element: str, dialect: str) -> tuple[int, int]:
    with quiet():
        import torchao.quantization.quant_primitives as ao

    parts = []
    dtype = GRIDS[element, dialect.lstrip("+") or "ocp"].dtype
    for granularity, block in _GRANULARITIES.items():
        spec = QuantSpec.parse(f"{element}:{granularity}{dialect}")
        for x in (hard()[9:].repeat(2, 1)[:64], hard()[9:].repeat(2, 1)[:64].to(torch.bfloat16).float()):
            codes, scales = encode(x, spec)
            scale = ao._choose_scale_float8(x, list(block), dtype)
            theirs = ao._quantize_affine_float8(x, scale, dtype)
            back = ao._dequantize_affine_float8(theirs, scale)
            parts += [
                differing(scales["scale"].reshape(-1), scale.reshape(-1)),
                differing(codes.float(), theirs.float()),
                differing(decode(codes, scales, spec, x.shape), back),
            ]
    return total(*parts)


def _mx(element: str, rule: str) -> tuple[int, int]:
    with quiet():
        from torchao.prototype.mx_formats import kernels
        from torchao.prototype.mx_formats.config import ScaleCalculationMode
        from torchao.prototype.mx_formats.mx_tensor import to_mx

    kinds: dict[str, Any] = {
        "mxfp8_e4m3": torch.float8_e4m3fn, "mxfp8_e5m2": torch.float8_e5m2, "mxfp4": torch.float4_e2m1fn_x2,
        "mxfp6_e3m2": "fp6_e3m2", "mxfp6_e2m3": "fp6_e2m3",
    }  # fmt: skip
    parts, spec = [], QuantSpec.parse(f"{element}:{rule}")
    for dtype in (torch.float32, torch.bfloat16):
        x = hard().to(dtype)
        scale, data = to_mx(x, kinds[element], 32, ScaleCalculationMode[rule.upper()])
        codes, scales = encode(x, spec)
        live = scales["scale"] != 0  # a block of zeros: any scale will do
        theirs = scale.view(torch.uint8).reshape(scales["scale"].shape)
        parts.append(differing(scales["scale"][live], theirs[live]))
        if element.startswith("mxfp8"):
            parts.append(differing(codes.float(), data.float().reshape(codes.shape)))
            continue
        bits = 4 if element == "mxfp4" else 6
        raw = data.view(torch.uint8)
        mine = unpack(codes, bits, x.shape[-1])
        unpacked = unpack(raw.reshape(codes.shape), bits, x.shape[-1]) if bits == 4 else raw.reshape(x.shape)
        parts.append(differing(_unsigned_zero(mine, bits), _unsigned_zero(unpacked, bits)))
        if bits == 6:  # their rounding alone, as codes
            units = torch.cat([torch.linspace(-30, 30, 6001), hard()[7]]).clamp(-28, 28)
            grid = GRIDS[element.removeprefix("mxfp6_"), "ocp"]
            cast = getattr(kernels, f"f32_to_f6_{grid.name}_unpacked")
            units = units.clamp(-grid.max, grid.max)
            ours = float_codes(round_to_grid(units, grid), grid)
            parts.append(differing(_unsigned_zero(ours, 6), _unsigned_zero(cast(units), 6)))
    return total(*parts)


def _unsigned_zero(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes with -0 as 0: which zero a format keeps is no part of its value."""
    return torch.where(codes == 1 << (bits - 1), 0, codes)
