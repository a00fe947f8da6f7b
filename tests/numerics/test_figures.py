"""The published and measured figures of every format: a codec that misses one is wrong."""

from __future__ import annotations

import pytest
import torch

from lumen.bench.numerics.figures import FULL, QUICK, Figure, figures
from lumen.bench.numerics.measure import gaussian, sqnr, trip
from lumen.formats import Noise, QuantSpec, decode, encode
from lumen.formats.codebook import kmeans
from lumen.formats.codec import bits_per_value
from lumen.formats.floats import GRIDS, MiniFloat, round_to_grid
from lumen.formats.lookup import dynamic4_table, dynamic8_table, to_table


@pytest.mark.parametrize("figure", figures(QUICK), ids=lambda figure: figure.id)
def test_figure(figure: Figure) -> None:
    """Published and measured figures: `lumen bench numerics --quick`, one test a line."""
    got = figure.measure()
    assert figure.holds(got), f"{got} where {figure.want} ({figure.kind}, {figure.bound}) is due"


def test_figures_are_bounds_that_can_fail() -> None:
    near = Figure("t", "n", 2.0, 0.1, lambda: 2.0)
    most, least = (Figure("t", "n", 2.0, 0, lambda: 2.0, kind) for kind in ("at most", "at least"))
    assert near.holds(2.05) and not near.holds(2.2) and not near.holds(1.8)
    assert most.holds(2.0) and not most.holds(2.1) and least.holds(2.0) and not least.holds(1.9)
    assert not any(f.holds(float("nan")) for f in (near, most, least))
    assert len({f.id for f in figures(FULL)}) == len(figures(FULL)) > len(figures(QUICK))


def test_maps() -> None:
    signed, unsigned = dynamic8_table(), dynamic8_table(signed=False)
    assert list(signed) == sorted(signed) and list(unsigned) == sorted(unsigned)
    assert unsigned[0] == 0 and unsigned[-1] == signed[-1] == 1 and 0 in signed
    first = (0.0055, 0.0325, 0.0775, 0.2125, 0.4375, 0.6625, 0.8875)
    assert dynamic4_table() == (*(-v for v in reversed(first)), 0.0, *first, 1.0)
    assert dynamic4_table(signed=False) == tuple((i + 1) / 16 for i in range(16))


@pytest.mark.parametrize("text", ["e4m3+sr", "e5m2+sr", "mxfp8_e4m3:rceil+sr", "dynamic8+sr", "dynamic4+sr", "int4+sr"])
def test_stochastic_rounding_is_unbiased(text: str) -> None:
    x = gaussian(256, 1024)
    mean = sum(trip(x, text, Noise("g", step=s)) for s in range(8)) / 8
    once = trip(x, text, Noise("g"))
    assert (mean - x).square().mean() < 0.2 * (once - x).square().mean()
    # dynamic4's map ends at -0.8875: the most negative values are clipped
    bound = 1e-2 if text.startswith("dynamic4") else 2e-3
    assert ((mean * x).sum() / x.square().sum()).item() == pytest.approx(1, abs=bound)


def test_bits_per_parameter() -> None:
    shape = (4096, 4096)
    figures = {"nf4": 4.5, "nf4+dq": 4.127, "int8": 8.008, "mxfp4": 4.25, "mxfp8_e4m3": 8.25, "mxfp6_e3m2": 6.25,
               "q8_0": 8.5, "q4_0": 4.5, "int4": 4.25, "dynamic8": 8.125, "ternary": 2.0}  # fmt: skip
    for text, figure in figures.items():
        assert bits_per_value(QuantSpec.parse(text), shape) == pytest.approx(figure, abs=1e-3), text
        x = gaussian(256, 1024)
        codes, scales = encode(x, QuantSpec.parse(text))
        stored = 8 * (codes.nbytes + sum(s.nbytes for s in scales.values())) / x.numel()
        assert stored == pytest.approx(bits_per_value(QuantSpec.parse(text), x.shape), abs=0.01), text


def test_learned_codebook_beats_nf4_and_follows_importance() -> None:
    x = gaussian(64, 1024)
    normal = torch.distributions.Normal(0.0, 1.0)
    lopsided = normal.icdf(gaussian(64, 1024).sigmoid()).abs()  # one-sided: half of NF4's codes are wasted
    for tensor in (x, lopsided):
        learned = (trip(tensor, "codebook") - tensor).square().mean()
        assert learned < (trip(tensor, "nf4") - tensor).square().mean()
    spec = QuantSpec.parse("codebook")
    importance = torch.ones_like(x)
    importance[:, :64] = 100.0
    plain = decode(*encode(x, spec), spec, x.shape)
    aware = decode(*encode(x, spec, importance=importance), spec, x.shape)
    cost = [((y - x).square() * importance).sum() for y in (plain, aware)]
    assert cost[1] < cost[0]
    exact = torch.tensor([-1.0, 0.0, 0.5, 2.0])
    assert torch.equal(kmeans(exact.repeat(50), torch.ones(200), 4), exact)


def test_range_expansion_beats_plain_e4m3_on_moments() -> None:
    """Second moments of one decade: the stretched format keeps more."""
    x = torch.exp(gaussian(64, 1024) * 0.5) * 1e-8
    assert sqnr(x, trip(x, "e4m3_expanded")) > sqnr(x, trip(x, "e4m3:1x128")) + 3
    x[0, :300] = 0
    assert (trip(x, "e4m3_expanded")[0, :300] == 0).all()
    same = torch.full((1, 256), -3.0)
    assert trip(same, "e4m3_expanded").sub(same).abs().max() < 0.02


def test_tables_of_small_floats() -> None:
    x = torch.linspace(-40, 40, 100001)

    def values(name: str) -> list[float]:
        return sorted(set(round_to_grid(x, GRIDS[name, "ocp"]).abs().tolist()))

    assert values("e2m1") == [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    assert len(values("e3m2")) == len(values("e2m3")) == 32 and values("e3m2")[-1] == 28 and values("e2m3")[-1] == 7.5
    assert GRIDS["e4m3", "fnuz"].max == 240 and GRIDS["e5m2", "fnuz"].max == 57344
    assert [GRIDS[n, "ocp"].emax for n in ("e4m3", "e5m2", "e3m2", "e2m3", "e2m1")] == [8, 15, 4, 2, 2]


@pytest.mark.parametrize("key", [("e4m3", "ocp"), ("e4m3", "fnuz"), ("e5m2", "ocp"), ("e5m2", "fnuz")])
def test_grid_is_torchs_cast(key: tuple[str, str]) -> None:
    """Every representable value, the midpoints between neighbours (ties), and random values."""
    grid: MiniFloat = GRIDS[key]
    assert grid.dtype is not None
    every = torch.arange(256, dtype=torch.uint8).view(grid.dtype).float()
    every = every[torch.isfinite(every)].sort().values
    x = torch.cat([every, (every[1:] + every[:-1]) / 2, gaussian(10000) * 50, gaussian(10000) * grid.bias**-4])
    x = x.clamp(-grid.max, grid.max)
    assert torch.equal(round_to_grid(x, grid), x.to(grid.dtype).float())


def test_dynamic_signed_map_indices_are_nearest() -> None:
    table = torch.tensor(dynamic8_table())
    blocks = gaussian(4, 256)
    absmax = blocks.abs().amax(1)
    codes = to_table(blocks, absmax, table)
    brute = (blocks[..., None] / absmax[:, None, None] - table).abs().argmin(-1)
    same = (table[codes] - table[brute]).abs()
    assert (same == 0).float().mean() > 0.999
