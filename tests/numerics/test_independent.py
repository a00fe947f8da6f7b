"""Bit for bit against implementations that we did not write: gguf, bitsandbytes, torchao.

gguf is a dependency; the others are optional and skip with a reason where they are not installed.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch

from lumen.bench.numerics.measure import gaussian, outliers
from lumen.formats import QuantSpec, decode, encode
from lumen.formats.ggml import gguf_blocks
from lumen.formats.lookup import NF4, dynamic8_table


def hard(rows: int = 16, cols: int = 256) -> torch.Tensor:
    """Gaussian values with outliers, ties, tiny and zero groups."""
    x = outliers(gaussian(rows, cols))
    x[0] = 0
    x[1] *= 1e-6
    x[2] = torch.linspace(-127, 127, cols).round() / 2
    x[3] = x[3].sign()
    return x


@pytest.mark.parametrize("name", ["Q8_0", "Q4_0"])
def test_gguf(name: str) -> None:
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize, quantize

    spec, x = QuantSpec.parse(name.lower()), hard()
    kind = GGMLQuantizationType[name]
    want = quantize(x.numpy(), kind)
    codes, scales = encode(x, spec)
    assert (gguf_blocks(codes, scales, spec).numpy() == want).all()
    assert (decode(codes, scales, spec, x.shape).numpy() == dequantize(want, kind)).all()


def _need(package: str) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed (pip install --no-deps {package})")


@pytest.mark.parametrize("block", [64, 128])
def test_bitsandbytes_nf4(block: int) -> None:
    _need("bitsandbytes")
    import bitsandbytes.functional as bnb

    spec, x = QuantSpec.parse(f"nf4:block{block}"), hard(64, 512)
    packed, state = bnb.quantize_4bit(x, blocksize=block, quant_type="nf4", compress_statistics=False)
    codes, scales = encode(x, spec)
    assert torch.equal(scales["scale"], state.absmax.reshape(-1))
    assert torch.equal(torch.tensor(NF4), state.code.cpu().float())
    assert torch.equal(codes, packed.reshape(-1))
    assert torch.equal(decode(codes, scales, spec, x.shape), bnb.dequantize_4bit(packed, state))


def test_bitsandbytes_double_quantisation() -> None:
    """Their nested absmax in our decoder and ours in theirs."""
    _need("bitsandbytes")
    import bitsandbytes.functional as bnb

    spec, x = QuantSpec.parse("nf4+dq"), hard(64, 512)
    packed, state = bnb.quantize_4bit(x, blocksize=64, quant_type="nf4", compress_statistics=True)
    codes, scales = encode(x, spec)
    assert torch.equal(codes, packed.reshape(-1))
    torch.testing.assert_close(scales["nested_offset"], state.offset)
    theirs = {"scale": state.absmax.reshape(-1), "nested_scale": state.state2.absmax, "nested_offset": state.offset}
    assert (scales["scale"] == theirs["scale"]).float().mean() > 0.995  # a last bit of the mean moves a tie
    want = bnb.dequantize_4bit(packed, state)
    torch.testing.assert_close(decode(packed, theirs, spec, x.shape), want, rtol=1e-6, atol=1e-7)


def test_bitsandbytes_dynamic8() -> None:
    _need("bitsandbytes")
    import bitsandbytes.functional as bnb

    spec, x = QuantSpec.parse("dynamic8"), hard(64, 512)
    assert torch.equal(torch.tensor(dynamic8_table()), bnb.create_dynamic_map(signed=True))
    assert torch.equal(torch.tensor(dynamic8_table(signed=False)), bnb.create_dynamic_map(signed=False))
    _, state = bnb.quantize_blockwise(x, blocksize=256)
    codes, scales = encode(x, spec)
    assert torch.equal(scales["scale"], state.absmax.reshape(-1))
    # the nearest entry, as their GPU kernel and torch path do; their fp32 CPU kernel looks up a coarse grid (0 → 2e-5)
    units = x.reshape(-1, 256) * (1 / state.absmax).nan_to_num(posinf=0.0).reshape(-1, 1)
    theirs = torch.stack([(row[:, None] - state.code).abs().argmin(-1) for row in units]).to(torch.uint8)
    live = (scales["scale"] != 0).repeat_interleave(256)  # in a block of zeros any code is 0
    assert torch.equal(codes[live], theirs.reshape(-1)[live])
    ours = bnb.dequantize_blockwise(codes.reshape(x.shape), state)
    assert torch.equal(decode(codes, scales, spec, x.shape), ours)


@pytest.mark.parametrize("rule", ["floor", "rceil", "even", "ceil"])
@pytest.mark.parametrize("text", ["mxfp8_e4m3", "mxfp8_e5m2", "mxfp4", "mxfp6_e3m2", "mxfp6_e2m3"])
def test_torchao_mx(text: str, rule: str) -> None:
    _need("torchao")
    mx: Any = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")
    config: Any = pytest.importorskip("torchao.prototype.mx_formats.config")
    element = {
        "mxfp8_e4m3": torch.float8_e4m3fn, "mxfp8_e5m2": torch.float8_e5m2, "mxfp4": torch.float4_e2m1fn_x2,
        "mxfp6_e3m2": "fp6_e3m2", "mxfp6_e2m3": "fp6_e2m3",
    }[text]  # fmt: skip
    x, spec = hard(32, 256), QuantSpec.parse(f"{text}:{rule}")
    mode = config.ScaleCalculationMode[rule.upper()]
    try:
        scale, data = mx.to_mx(x, element, 32, mode)
    except (AssertionError, NotImplementedError, ValueError) as error:
        pytest.skip(f"torchao does not make {text} with {rule}: {error}")
    codes, scales = encode(x, spec)
    live = scales["scale"] != 0  # blocks of zeros: any scale will do
    assert torch.equal(scales["scale"][live], scale.view(torch.uint8).reshape(scales["scale"].shape)[live])
    if element in (torch.float8_e4m3fn, torch.float8_e5m2):
        assert torch.equal(codes.float(), data.float().reshape(codes.shape))
    elif text == "mxfp4":
        assert torch.equal(_unsigned_zero(codes), _unsigned_zero(data.view(torch.uint8).reshape(codes.shape)))


def _unsigned_zero(packed: torch.Tensor) -> torch.Tensor:
    low, high = packed & 15, packed >> 4
    return torch.stack([torch.where(n == 8, 0, n) for n in (low, high)])
