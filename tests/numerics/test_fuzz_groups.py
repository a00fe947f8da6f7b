"""Marked groups, scales that overflow, scalars, empty tensors, and learned codebooks against the exact optimum."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from lumen.core import QuantError
from lumen.formats import QuantSpec, decode, encode

GROUP = {"int4:group5": 5, "int4": 128, "ternary:group16": 16, "int8:block32": 32, "e4m3:1x128": 128, "e5m2:1x128": 128,
         "mxfp8_e4m3": 32, "mxfp6_e2m3": 32, "mxfp4": 32, "mxfp4+hadamard16": 32, "q8_0": 32, "q4_0": 32, "nf4": 64,
         "nf4+dq": 64 * 256, "dynamic8": 256, "dynamic4": 128, "codebook": 64, "e4m3_expanded": 256}  # fmt: skip


@pytest.mark.parametrize("text", GROUP)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_marked_group_is_nan_and_its_neighbours_are_what_they_were(text: str, bad: float) -> None:
    """Packed codes of a marked group must not reach into another group's bytes."""
    spec, size, cols = QuantSpec.parse(text), GROUP[text], 128 * 520 if text == "nf4+dq" else 1280
    x = torch.randn(2, cols)
    hit = x.clone()
    hit[0, size + 1] = bad
    clean = decode(*encode(x, spec), spec, x.shape)
    marked = decode(*encode(hit, spec, nonfinite="mark"), spec, x.shape)
    inside = torch.zeros_like(x, dtype=torch.bool)
    inside[0, size : 2 * size] = True
    assert marked[inside].isnan().all() and marked[~inside].isfinite().all()
    if text not in ("codebook", "nf4+dq"):  # the learned table, or the mean of absmax, is the whole tensor's
        assert torch.equal(marked[~inside], clean[~inside])


@pytest.mark.parametrize(("text", "top"), [("q8_0", 1e7), ("q4_0", 1e6), ("int8:block32", 1e7), ("e5m2:1x128", 1e10)])
def test_a_scale_that_does_not_fit_fp16_raises_or_marks(text: str, top: float) -> None:
    x = torch.randn(1, 128)
    x[0, 3] = top
    spec = QuantSpec.parse(text)
    options = {} if text.startswith("q") else {"scale_dtype": torch.float16}
    with pytest.raises(QuantError, match="too large for fp16"):
        encode(x, spec, **options)  # type: ignore[arg-type]
    assert decode(*encode(x, spec, nonfinite="mark", **options), spec, x.shape)[0, :32].isnan().all()  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["int8:row", "int4", "ternary", "e4m3:1x128", "mxfp4", "mxfp6_e3m2", "nf4", "nf4+dq",
                                  "dynamic8", "e4m3_expanded", "codebook", "mxfp4+hadamard32"])  # fmt: skip
@pytest.mark.parametrize("shape", [(), (0,), (0, 5), (3, 0), (1,), (2, 0, 7)])
def test_scalars_and_empty_tensors(text: str, shape: tuple[int, ...]) -> None:
    spec, x = QuantSpec.parse(text), torch.full(shape, -2.0)
    back = decode(*encode(x, spec), spec, shape)
    assert back.shape == x.shape and torch.allclose(back, x, rtol=0.2)


def test_types_that_are_not_quantised_are_refused() -> None:
    for dtype in (torch.float64, torch.float8_e4m3fn, torch.int8):
        with pytest.raises(QuantError, match="only fp32, bf16 and fp16"):
            encode(torch.ones(2, 4).to(dtype), QuantSpec.parse("int8"))


def best_partition(values: list[float], weights: list[float], k: int) -> float:
    """The least Σ w (x - c)² over k clusters: exact, by dynamic programming over intervals of the sorted values."""
    order = sorted(range(len(values)), key=values.__getitem__)
    w = np.cumsum([0.0] + [weights[i] for i in order])
    wx = np.cumsum([0.0] + [weights[i] * values[i] for i in order])
    wxx = np.cumsum([0.0] + [weights[i] * values[i] ** 2 for i in order])

    def cost(a: int, b: int) -> float:
        mass = w[b] - w[a]
        return float(wxx[b] - wxx[a] - (wx[b] - wx[a]) ** 2 / mass) if mass > 0 else 0.0

    best = [0.0] + [math.inf] * len(order)
    for _ in range(k):
        best = [0.0] + [min(best[a] + cost(a, b) for a in range(b)) for b in range(1, len(order) + 1)]
    return best[-1]


def test_kmeans_is_stationary_and_optimal() -> None:
    from lumen.formats.codebook import kmeans

    for seed in range(4):
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(160, generator=generator) ** (1 if seed % 2 else 3)
        mass = torch.rand(160, generator=generator) ** 4
        centres = kmeans(x, mass, 8).double()
        assert torch.equal(centres, centres.sort().values)
        at = (x.double()[:, None] - centres).abs().argmin(1)
        for c in range(8):
            own = at == c
            mean = (x.double() * mass.double())[own].sum() / mass.double()[own].sum()
            assert not own.any() or float(centres[c]) == pytest.approx(float(mean), rel=1e-5, abs=1e-6)
        cost = float((mass.double() * (x.double() - centres[at]).square()).sum())
        assert cost <= (1 + 1e-6) * best_partition(x.tolist(), mass.tolist(), 8)


def test_importance_weights_are_per_value_or_per_channel_and_checked() -> None:
    x, spec = torch.randn(8, 64), QuantSpec.parse("codebook")
    channel = torch.rand(64)
    one, all_ = (encode(x, spec, importance=w) for w in (channel, channel.expand(8, 64)))
    assert torch.equal(one[1]["codebook"], all_[1]["codebook"])
    assert not torch.equal(one[1]["codebook"], encode(x, spec)[1]["codebook"])
    for wrong in (torch.ones(8), torch.ones(512), -channel, channel * float("nan")):
        with pytest.raises(QuantError, match="importance weights"):
            encode(x, spec, importance=wrong)


@pytest.mark.parametrize("size", [1e-36, 1e-20, 1e20, 1e36])
def test_a_codebook_does_not_depend_on_the_tensors_size(size: float) -> None:
    x, spec = torch.randn(16, 64), QuantSpec.parse("codebook")
    _, scales = encode(x * size, spec)
    assert torch.allclose(scales["codebook"], encode(x, spec)[1]["codebook"], atol=1e-5)
