"""Against torch: casts to the four FP8 types over every bf16 value and every tie, E8M0, and the dialects' twins.

torch's cast of a value beyond the range is not the definition (FNUZ gives NaN), so values are clamped before it.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from lumen.bench.numerics.equality import Comparison, differing, total
from lumen.bench.numerics.measure import gaussian
from lumen.formats.floats import GRIDS, MiniFloat, float_codes, ocp_to_fnuz, round_to_grid
from lumen.formats.mx import e8m0_values

_FLOAT8 = [(name, dialect) for name in ("e4m3", "e5m2") for dialect in ("ocp", "fnuz")]


def comparisons() -> Iterator[Comparison]:
    for key in _FLOAT8:
        name = f"{key[0]} {key[1]}: casts of every bf16 value, ties, Gaussians"
        yield Comparison("torch", name, partial(_cast, GRIDS[key]))
    for name in ("e4m3", "e5m2"):
        yield Comparison("torch", f"{name}: every OCP code read as FNUZ at twice the scale", partial(_twin, name))
    yield Comparison("torch", "e8m0: every byte", _e8m0)


def every_code(grid: MiniFloat) -> torch.Tensor:
    """The 256 codes of an FP8 type."""
    assert grid.dtype is not None
    return torch.arange(256, dtype=torch.int16).to(torch.uint8).view(grid.dtype)


def _cast(grid: MiniFloat) -> tuple[int, int]:
    assert grid.dtype is not None
    bf16 = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    values = every_code(grid).float()
    values = values[torch.isfinite(values)].sort().values
    ties = (values[1:] + values[:-1]) / 2
    near = torch.cat([torch.nextafter(ties, torch.tensor(end)) for end in (-1e38, 1e38)])
    x = torch.cat([bf16[~torch.isnan(bf16)], values, ties, near, gaussian(100_000), 50 * gaussian(100_000, seed=1)])
    x = x.clamp(-grid.max, grid.max)
    want = x.to(grid.dtype)
    ours = float_codes(round_to_grid(x, grid), grid)
    return total(differing(ours.float(), want.float()), differing(round_to_grid(x, grid), want.float()))


def _twin(name: str) -> tuple[int, int]:
    codes = every_code(GRIDS[name, "ocp"])
    codes = codes[torch.isfinite(codes.float())]
    scale = torch.tensor(0.37)
    twin, doubled = ocp_to_fnuz(codes, scale)
    return differing(twin.float() * doubled, codes.float() * scale)


def _e8m0() -> tuple[int, int]:
    byte = torch.arange(256, dtype=torch.int16).to(torch.uint8)
    return differing(e8m0_values(byte), byte.view(torch.float8_e8m0fnu).float())
