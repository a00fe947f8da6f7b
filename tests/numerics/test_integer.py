"""INT8: the figures that a right implementation reproduces, and the edges."""

from __future__ import annotations

import pytest
import torch

from lumen.bench.numerics.measure import gaussian, sqnr, trip
from lumen.core import QuantError
from lumen.formats import Noise, QuantSpec, decode, encode
from lumen.kernels.int8 import int8_matmul, quantize_int8


def test_gemm_sqnr() -> None:
    """K = 1024, row scales: 39.1 dB."""
    a, b = gaussian(512, 1024), gaussian(1024, 512, seed=1)
    (qa, sa), (qb, sb) = quantize_int8(a, 1), quantize_int8(b, 0)
    assert sqnr(a.double() @ b.double(), int8_matmul(qa, qb, sa, sb, torch.float32)) == pytest.approx(39.1, abs=0.3)


def test_stochastic_rounding_has_no_bias() -> None:
    small = torch.full((1, 4096), 0.3)
    small[0, 0] = 127.0  # scale 1: a value of 0.3 rounds up three times in ten
    assert trip(small, "int8+sr", Noise("b"))[0, 1:].mean().item() == pytest.approx(0.3, abs=0.03)
    assert trip(small, "int8")[0, 1:].abs().max() == 0


def test_stochastic_rounding_repeats_and_depends_on_every_coordinate() -> None:
    x = gaussian(8, 64)
    base = {"name": "w", "seed": 1, "step": 2, "micro_step": 3, "rank": 4}
    codes = trip(x, "int8+sr", Noise(**base))  # type: ignore[arg-type]
    assert torch.equal(codes, trip(x, "int8+sr", Noise(**base)))  # type: ignore[arg-type]
    for key in base:
        other = {**base, key: "v" if key == "name" else 9}
        assert not torch.equal(codes, trip(x, "int8+sr", Noise(**other)))  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["int8:tensor", "int8:row", "int8:block32", "int8:group48", "int8:8x16", "int8:3x5"])
@pytest.mark.parametrize("shape", [(7,), (3, 50), (2, 5, 33), (1, 1)])
def test_any_shape_round_trips(text: str, shape: tuple[int, ...]) -> None:
    """The error of every value is at most half a step of its own group; groups at the edge may be short."""
    x = gaussian(*shape)
    error = (trip(x, text) - x).abs().max()
    assert trip(x, text).shape == x.shape and error <= x.abs().max() / 127 * 0.5001


def test_zero_groups_get_scale_one() -> None:
    """A scale of 0 would give 0/0 = NaN."""
    x = torch.zeros(4, 64)
    x[1] = 1
    for text in ("int8:row", "int8:block32", "int8:row:pow2"):
        codes, scales = encode(x, QuantSpec.parse(text))
        assert (scales["scale"][0] == 1).all() and codes[0].abs().max() == 0
        assert trip(x, text).isfinite().all()
    assert trip(torch.zeros(3, 8), "int8:tensor").abs().max() == 0
    tiny = torch.full((1, 8), 1e-40)
    assert trip(tiny, "int8").isfinite().all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_nonfinite_groups_raise_or_are_marked(bad: float) -> None:
    x = gaussian(3, 64)
    x[1, 7] = bad
    with pytest.raises(QuantError, match="1 of 3 groups"):
        trip(x, "int8:row")
    spec = QuantSpec.parse("int8:row")
    marked = decode(*encode(x, spec, nonfinite="mark"), spec, x.shape)
    assert marked[1].isnan().all() and marked[[0, 2]].isfinite().all()
    with pytest.raises(QuantError, match="policies"):
        encode(x, spec, nonfinite="ignore")


def test_scale_is_rounded_before_the_codes() -> None:
    """With bf16 scales the codes divide by the stored number: no code is more than half a step off."""
    x = gaussian(64, 256)
    codes, scales = encode(x, QuantSpec.parse("int8"), scale_dtype=torch.bfloat16)
    scale = scales["scale"].float()
    assert scales["scale"].dtype == torch.bfloat16
    # the scale may have been rounded down, so the largest value of a row may lie up to 2⁻⁹ · 127 beyond the last code
    inside = x.abs() <= 127 * scale
    assert ((codes * scale - x).abs()[inside] <= 0.5001 * scale.expand_as(x)[inside]).all()


def test_pow2_scales_are_powers_of_two_and_never_clip() -> None:
    x = gaussian(64, 256)
    codes, scales = encode(x, QuantSpec.parse("int8:row:pow2"))
    mantissa, _ = torch.frexp(scales["scale"])
    assert (mantissa == 0.5).all() and (codes.float() * scales["scale"] - x).abs().max() <= scales["scale"].max() / 2


def test_noise_is_required_or_refused() -> None:
    with pytest.raises(QuantError, match="needs a Noise"):
        encode(gaussian(2, 8), QuantSpec.parse("int8+sr"))
    with pytest.raises(QuantError, match="no Noise"):
        encode(gaussian(2, 8), QuantSpec.parse("int8"), noise=Noise())
    with pytest.raises(QuantError, match="floating-point"):
        encode(torch.ones(2, 8, dtype=torch.int32), QuantSpec.parse("int8"))
