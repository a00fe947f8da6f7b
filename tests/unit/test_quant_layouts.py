"""Key layouts on the disk: bitsandbytes' for NF4, compressed-tensors' for int8, fp8 and int4; both directions."""

from __future__ import annotations

import importlib.util
import json
from typing import Any

import pytest
import torch
from tests.helpers import tiny_llama
from torch import nn

from lumen.core import QuantError
from lumen.formats import QuantSpec
from lumen.quant import QuantizedTensor, QuantLinear, dequantize, quantize, quantize_tensor
from lumen.quant.layouts import from_disk, is_quantised, to_disk

STATE = "weight.quant_state.bitsandbytes__nf4"
SPECS = ["nf4:block64+dq", "nf4:block64", "nf4:block128+dq", "int4", "int4:group32", "int4:row", "int8", "int8:tensor",
         "e4m3:row", "e4m3:128x128", "mxfp4", "mxfp8_e4m3", "ternary", "codebook", "q8_0", "q4_0"]  # fmt: skip


def need_bitsandbytes() -> Any:
    if importlib.util.find_spec("bitsandbytes") is None:
        pytest.skip("bitsandbytes is not installed (it is in the dev extra; no wheel for this platform?)")
    return importlib.import_module("bitsandbytes")


def layer(spec: str, *, n: int = 48, k: int = 128, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> QuantLinear:
    torch.manual_seed(seed)
    box = nn.Sequential(nn.Linear(k, n, bias=False, dtype=dtype)).requires_grad_(False)
    quantize(box, {"weight": spec})
    found = box[0]
    assert isinstance(found, QuantLinear)
    return found


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("shape", [(48, 96), (7, 64), (3, 160)])
def test_every_layout_round_trips(spec: str, shape: tuple[int, int]) -> None:
    q = quantize_tensor(torch.randn(shape, generator=torch.Generator().manual_seed(1)), spec)
    parts = (q.codes, *q.scales.values())
    disk = to_disk(parts, q.spec, shape, torch.bfloat16)
    assert is_quantised(disk) and not is_quantised({"": torch.zeros(2, 2)})
    back = from_disk(disk, q.spec)
    assert back.spec == q.spec and len(back.parts) == len(parts)
    for a, b in zip(parts, back.parts, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.float(), b.float())


@pytest.mark.parametrize("spec", SPECS)
def test_state_dict_loads_into_codes_and_master(spec: str) -> None:
    first, second = layer(spec), layer(spec, seed=1)
    second.load_state_dict(first.state_dict())
    assert torch.equal(second.weight, first.weight)
    master = nn.Sequential(nn.Linear(128, 48, bias=False))
    quantize(master, {"weight": spec}, frozen=False)
    assert isinstance(master[0], QuantLinear) and not master[0].plan.stores_codes
    master[0].load_state_dict(first.state_dict())
    torch.testing.assert_close(master[0].weight.to(first.weight.dtype), first.weight, rtol=0, atol=0)


def test_one_tensor_saves_and_loads(tmp_path: Any) -> None:
    for spec in SPECS:
        q = quantize_tensor(torch.randn(5, 64), spec)
        q.save(tmp_path / "q.safetensors")
        back = QuantizedTensor.load(tmp_path / "q.safetensors")
        assert torch.equal(back.dequantize(), q.dequantize()) and back.spec == q.spec


@pytest.mark.parametrize("dq", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_bitsandbytes_loads_ours(dq: bool, dtype: torch.dtype) -> None:
    bnb = need_bitsandbytes()
    ours = layer("nf4:block64" + ("+dq" if dq else ""), dtype=dtype)
    state = ours.state_dict()
    expected = {"weight", "weight.absmax", "weight.quant_map", STATE}
    assert set(state) == expected | ({"weight.nested_absmax", "weight.nested_quant_map"} if dq else set())
    stats = {k.removeprefix("weight."): v for k, v in state.items() if k != "weight"}
    theirs = bnb.nn.Params4bit.from_prequantized(state["weight"], stats, device="cpu")
    assert theirs.quant_state.shape == torch.Size([48, 128]) and theirs.quant_state.dtype == dtype
    dense = bnb.functional.dequantize_4bit(theirs.data, theirs.quant_state)
    assert torch.equal(dense, ours.weight)


@pytest.mark.parametrize("dq", [True, False])
def test_ours_loads_bitsandbytes_and_gives_the_same_bytes_back(dq: bool) -> None:
    """Fails if any key, dtype or the JSON's meaning differs from what bitsandbytes writes.

    K is a multiple of 64: bitsandbytes 0.50's CPU kernel dequantises other rows with the wrong absmax (its codes are
    right: blocks run over the flattened tensor, as its GPU kernels and ours have it).
    """
    bnb = need_bitsandbytes()
    theirs = bnb.nn.Linear4bit(128, 48, bias=False, quant_type="nf4", compress_statistics=dq)
    theirs.weight = bnb.nn.Params4bit(
        torch.randn(48, 128).bfloat16(), requires_grad=False, quant_type="nf4", compress_statistics=dq
    )
    theirs = theirs.to("cpu")
    theirs.weight = theirs.weight.to("cpu")
    state = theirs.state_dict()
    assert STATE in state, "bitsandbytes did not quantise on the CPU"
    ours = layer("nf4:block64" + ("+dq" if dq else ""), seed=2)
    ours.load_state_dict(state)
    assert torch.equal(ours.weight, bnb.functional.dequantize_4bit(theirs.weight.data, theirs.weight.quant_state))
    again = ours.state_dict()
    assert set(again) == set(state)
    for key, value in state.items():
        if key == STATE:
            assert json.loads(bytes(again[key].tolist())) == json.loads(bytes(value.tolist()))
        else:
            assert again[key].dtype == value.dtype and torch.equal(again[key], value), key


def test_what_does_not_fit_is_refused() -> None:
    """A state dict with another block size, another shape, missing keys or a foreign code is an error, not garbage."""
    ours = layer("nf4:block64+dq")
    for other, match in (("nf4:block128+dq", "the file holds"), ("nf4:block64", "the file holds")):
        with pytest.raises(QuantError, match=match):
            ours.load_state_dict(layer(other).state_dict())
    with pytest.raises(QuantError, match="here it is"):
        ours.load_state_dict(layer("nf4:block64+dq", n=128, k=48).state_dict())
    state = ours.state_dict()
    with pytest.raises(QuantError, match=r"not weight\.absmax"):
        ours.load_state_dict({k: v for k, v in state.items() if not k.endswith(".absmax")})
    fp4 = {k.replace("__nf4", "__fp4"): v for k, v in state.items()}
    with pytest.raises(QuantError, match="fp4 is not read"):
        ours.load_state_dict(fp4)
    with pytest.raises(QuantError, match="own"):
        ours.load_state_dict({**state, "weight.quant_map": torch.linspace(-1, 1, 16)})


def test_int4_is_compressed_tensors_packing() -> None:
    """weight_packed [N, K/8] int32, code q + 8 of element i at bits 4i, written out here from the format's page."""
    ours = layer("int4:group32", k=96, n=4)
    state = ours.state_dict()
    assert set(state) == {"weight_packed", "weight_scale", "weight_shape"}
    assert state["weight_packed"].dtype == torch.int32 and state["weight_packed"].shape == (4, 12)
    assert state["weight_shape"].tolist() == [4, 96] and state["weight_scale"].shape == (4, 3)
    shifts = torch.arange(8) * 4
    codes = ((state["weight_packed"].long().unsqueeze(-1) >> shifts) & 15).flatten(1) - 8
    values = codes.float() * state["weight_scale"].repeat_interleave(32, 1)
    assert torch.equal(values.bfloat16(), ours.weight)


def test_model_state_dict_and_dequantize_keys() -> None:
    model = tiny_llama(dtype=torch.bfloat16).requires_grad_(False)
    before = list(model.state_dict())
    quantize(model, "nf4")
    state = model.state_dict()
    assert sum(STATE in key for key in state) == 14
    assert QuantSpec.parse("nf4+dq") == model.model.layers[0].mlp.up_proj.spec
    other = tiny_llama(seed=5, dtype=torch.bfloat16).requires_grad_(False)
    quantize(other, "nf4")
    missing, unexpected = other.load_state_dict(state)
    assert not missing and not unexpected
    ids = torch.arange(4, 14)[None]
    assert torch.equal(other(input_ids=ids).logits, model(input_ids=ids).logits)
    dequantize(model)
    assert list(model.state_dict()) == before


@pytest.mark.parametrize("spec", ["nf4:block64", "nf4:block128+dq", "nf4:block64+dq"])
def test_large_weights_in_chunks_are_the_same(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a chunk ends inside a block or a byte, or rounds twice."""
    from lumen.formats import lookup

    for shape in ((96, 128), (33, 64), (1, 4096)):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(3)).bfloat16()
        whole = quantize_tensor(x, spec)
        want = {d: whole.dequantize(d) for d in (torch.bfloat16, torch.float32)}
        monkeypatch.setattr(lookup, "CHUNK", 1000)
        small = quantize_tensor(x, spec)
        assert torch.equal(small.codes, whole.codes)
        assert all(torch.equal(small.scales[k], whole.scales[k]) for k in whole.scales)
        for dtype, values in want.items():
            assert torch.equal(small.dequantize(dtype), values)
        whole_blocks = x.numel() % small.spec.granularity.cols == 0
        fast = lookup.decode_nf4(small.codes, small.scales, small.spec, shape, torch.float32)
        assert (fast is not None) == whole_blocks
        monkeypatch.undo()
