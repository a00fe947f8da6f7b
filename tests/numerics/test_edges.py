"""Odd shapes, zeros, NaN, infinity, dialects: for every format."""

from __future__ import annotations

import pytest
import torch

from lumen.bench.numerics.measure import gaussian
from lumen.core import QuantError
from lumen.formats import FORMATS, Noise, QuantSpec, decode, encode
from lumen.formats.floats import GRIDS, fnuz_to_ocp, ocp_to_fnuz
from lumen.formats.mx import shared_exponent
from lumen.formats.packing import pack, packed_size, unpack
from lumen.quant import quantize_tensor

EVERY = [*FORMATS, "nf4+dq", "mxfp4+hadamard16", "int8+hadamard32", "e4m3:128x128", "e4m3:row:pow2", "int4:row"]
OWN_ZERO = {"nf4": 0, "dynamic8": 0, "dynamic4": 0, "codebook": 0, "q8_0": 0, "q4_0": 0}


@pytest.mark.parametrize("text", EVERY)
@pytest.mark.parametrize("shape", [(64,), (3, 96), (2, 5, 32), (5, 50), (1, 1), (7, 33), (0, 32)])
def test_shapes(text: str, shape: tuple[int, ...]) -> None:
    spec = QuantSpec.parse(text)
    x = gaussian(*shape)
    if spec.element in ("q8_0", "q4_0") and shape[-1] % 32:
        with pytest.raises(QuantError, match="multiple of 32"):
            encode(x, spec)
        return
    q = quantize_tensor(x, spec)
    y = q.dequantize()
    assert y.shape == x.shape and y.isfinite().all()
    if x.numel() > 32 and spec.element not in ("ternary",):
        assert (y - x).square().mean() < 0.05 * x.square().mean()


@pytest.mark.parametrize("text", EVERY)
def test_zeros_stay_zero_and_nonfinite_is_never_hidden(text: str) -> None:
    spec = QuantSpec.parse(text)
    zeros = torch.zeros(2, 128)
    codes, scales = encode(zeros, spec)
    assert (decode(codes, scales, spec, zeros.shape) == 0).all()
    if "scale" in scales and spec.element in OWN_ZERO and not spec.double_quant:
        assert (scales["scale"] == 0).all()
    elif spec.element.startswith("mxfp"):
        assert (scales["scale"] == 0).all()  # E8M0 byte 0
    for bad in (float("nan"), float("inf")):
        x = gaussian(2, 512)
        x[0, 3] = bad
        with pytest.raises(QuantError, match="NaN or Inf"):
            encode(x, spec)
        codes, scales = encode(x, spec, nonfinite="mark")
        assert decode(codes, scales, spec, x.shape)[0].isnan().any(), bad


@pytest.mark.parametrize("bits", [2, 4, 6, 8])
@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 32, 33])
@pytest.mark.parametrize("high_first", [False, True])
def test_packing(bits: int, count: int, high_first: bool) -> None:
    codes = torch.randint(0, 2**bits, (3, count), dtype=torch.uint8)
    packed = pack(codes, bits, high_first=high_first)
    assert packed.shape[-1] == packed_size(count, bits)
    assert torch.equal(unpack(packed, bits, count, high_first=high_first), codes)


def test_nibble_orders() -> None:
    codes = torch.tensor([1, 2, 3, 4], dtype=torch.uint8)
    assert pack(codes, 4).tolist() == [0x21, 0x43] and pack(codes, 4, high_first=True).tolist() == [0x12, 0x34]


def test_ocp_and_fnuz_are_the_same_bits_at_twice_the_scale() -> None:
    x = gaussian(4, 256)
    x[0, 0] = -0.0
    for element in ("e4m3", "e5m2"):
        codes, scales = encode(x, QuantSpec.parse(element))
        fnuz, scale = ocp_to_fnuz(codes, scales["scale"])
        want = codes.float() * scales["scale"]
        assert torch.equal(fnuz.float() * scale, want)
        assert not (fnuz.view(torch.uint8) == 0x80).any()
        back, again = fnuz_to_ocp(fnuz, scale)
        assert torch.equal(back.float() * again, want)
    for bits in (0x7F, 0xFF):
        with pytest.raises(QuantError, match="NaN"):
            ocp_to_fnuz(torch.tensor([bits], dtype=torch.uint8).view(torch.float8_e4m3fn), torch.ones(()))
    with pytest.raises(QuantError, match="NaN or infinity"):
        ocp_to_fnuz(torch.tensor([0x7C], dtype=torch.uint8).view(torch.float8_e5m2), torch.ones(()))
    with pytest.raises(QuantError, match="no OCP twin"):
        fnuz_to_ocp(torch.tensor([0x7F], dtype=torch.uint8).view(torch.float8_e4m3fnuz), torch.ones(()))


def test_dialect_is_injectable_and_its_max_is_its_own() -> None:
    """As gfx942 (FNUZ, 240) and as gfx950 (OCP, 448), here on a CPU."""
    x = gaussian(4, 256)
    for text, largest in (("e4m3", 448.0), ("e4m3+fnuz", 240.0)):
        codes, scales = encode(x, QuantSpec.parse(text))
        assert codes.float().abs().max() == largest
        assert scales["scale"].item() == pytest.approx(x.abs().max().item() / largest)


@pytest.mark.parametrize(
    ("rule", "amax", "exponent"),
    [
        # E2M1: emax 2, max 6
        ("floor", 7.9, 0), ("floor", 8.0, 1), ("floor", 4.0, 0), ("floor", 3.99, -1),
        ("ceil", 4.0, 0), ("ceil", 4.01, 1), ("rceil", 6.0, 0), ("rceil", 6.01, 1), ("rceil", 3.0, -1),
        ("even", 6.99, 0), ("even", 7.0, 1), ("even", 3.5, 0), ("even", 3.49, -1),
    ],
)  # fmt: skip
def test_scale_rules_by_hand(rule: str, amax: float, exponent: int) -> None:
    byte = shared_exponent(torch.tensor([amax]), GRIDS["e2m1", "ocp"], rule)
    assert int(byte[0]) - 127 == exponent


@pytest.mark.parametrize("text", ["mxfp8_e4m3", "mxfp8_e5m2", "mxfp6_e3m2", "mxfp6_e2m3", "mxfp4"])
@pytest.mark.parametrize("rule", ["floor", "rceil", "even", "ceil"])
def test_mx_codes_at_extreme_magnitudes(text: str, rule: str) -> None:
    for size in (1e-44, 1e-38, 1e-30, 1e30, 2e38):
        x = gaussian(2, 64).sign() * size
        y = decode(*encode(x, QuantSpec.parse(f"{text}:{rule}")), QuantSpec.parse(f"{text}:{rule}"), x.shape)
        assert y.isfinite().all()
        if 1e-37 < size < 1e38:
            assert ((y - x).abs() <= 0.26 * size).all()


def test_sr_spec_draws_by_name() -> None:
    x = gaussian(4, 64)
    a, b = (quantize_tensor(x, "mxfp4:rceil+hadamard16+sr", name=n) for n in ("a", "b"))
    again = quantize_tensor(x, "mxfp4:rceil+hadamard16+sr", noise=Noise("a"))
    assert torch.equal(a.codes, again.codes) and not torch.equal(a.codes, b.codes)
