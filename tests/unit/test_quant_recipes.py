"""Every recipe that this version can run, on a whole model: frozen and trained, saved, reloaded, taken back."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.helpers import tiny_llama

from lumen.core import QuantError
from lumen.formats import QuantSpec, decode, encode
from lumen.quant import QuantLinear, dequantize, quantize, recipes

READY = [name for name, why in recipes.available().items() if not why and name != "bf16"]
IDS = torch.arange(5, 29).reshape(2, 12)


def run(model: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model.zero_grad()
    logits = model(input_ids=IDS).logits
    logits.backward(torch.randn(logits.shape, generator=torch.Generator().manual_seed(1)))
    return logits.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def test_which_recipes_run() -> None:
    assert set(READY) == {
        "int8", "int8-backward", "int8-smooth", "int8-weight-only", "fp8", "fp8-rowwise", "fp8-blockwise",
        "fp8-delayed", "mxfp8", "mxfp4", "nf4", "int4", "q8_0", "q4_0", "bitnet",
    }  # fmt: skip
    assert set(READY) == set(recipes.RECIPES) - {"bf16"}


@pytest.mark.parametrize("recipe", READY)
@pytest.mark.parametrize("frozen", [True, False])
def test_trains_near_the_original_and_goes_back(recipe: str, frozen: bool) -> None:
    model = tiny_llama()
    reference = copy.deepcopy(model)
    keys, kinds = list(model.state_dict()), [(n, type(m)) for n, m in model.named_modules()]
    report = quantize(model, recipe, frozen=frozen)
    assert len(report.layers) == 14 and str(report)
    (got, grads), (want, exact) = run(model), run(reference)
    low = {"bitnet": 0.75, "mxfp4": 0.93}.get(recipe, 0.97)
    assert torch.nn.functional.cosine_similarity(got.flatten(), want.flatten(), dim=0) > low
    assert set(grads) == {n for n in exact if not (frozen and "proj" in n)}
    for name, grad in grads.items():
        near = torch.nn.functional.cosine_similarity(grad.flatten(), exact[name].flatten(), dim=0)
        assert near > {"bitnet": 0.3, "mxfp4": 0.6}.get(recipe, 0.9), name
    dequantize(model)
    assert list(model.state_dict()) == keys and [(n, type(m)) for n, m in model.named_modules()] == kinds
    if recipe != "int8-backward":
        name = "model.layers.0.mlp.up_proj"
        weight, original = model.get_submodule(name).weight, reference.get_submodule(name).weight.detach()
        spec = recipes.recipe(recipe).spec(name, "weight")
        assert isinstance(spec, QuantSpec)
        if spec.transform == "smooth":  # the codes are those of W·s
            assert torch.allclose(weight, original, rtol=0, atol=original.abs().max() / 40)
            return
        codes, scales = encode(original, spec.with_(scaling="dynamic"))
        assert torch.equal(weight, decode(codes, scales, spec, original.shape) if frozen else original)


@pytest.mark.parametrize("recipe", READY)
def test_saved_and_cast_and_reloaded(recipe: str, tmp_path: Any) -> None:
    """Codes and scales survive `.to(dtype)`, a safetensors file and a model made from another seed."""
    model = tiny_llama()
    quantize(model, recipe, frozen=True)
    model(input_ids=IDS)  # what smoothing is calibrated on
    before = {n: t.clone() for n, t in model.state_dict().items() if "proj" in n}
    cast = copy.deepcopy(model).to(torch.bfloat16).to(torch.float32)
    for name, tensor in cast.state_dict().items():
        if name in before and recipe != "int8-backward":
            assert tensor.dtype == before[name].dtype, name
            assert torch.equal(tensor.reshape(-1).view(torch.uint8), before[name].reshape(-1).view(torch.uint8)), name
    save_file({n: t.contiguous() for n, t in model.state_dict().items()}, tmp_path / "m.safetensors")
    other = tiny_llama(seed=7)
    quantize(other, recipe, frozen=True)
    other.load_state_dict(load_file(tmp_path / "m.safetensors"))
    assert torch.equal(other(input_ids=IDS).logits, model(input_ids=IDS).logits)


def test_emulated_is_called_emulated_and_four_bits_are_four_bits() -> None:
    report = quantize(tiny_llama(), "mxfp8", frozen=True)
    assert {g.kind for x in report.layers for g in x.gemms} == {"emulated"}
    report = quantize(tiny_llama(hidden_size=64, intermediate_size=128), "nf4", frozen=True)
    layer = next(x for x in report.layers if x.name.endswith("layers.0.mlp.up_proj"))
    assert layer.bytes_per_parameter == pytest.approx((4 + 8 / 64) / 8, abs=0.002)
    assert {g.kind for g in layer.gemms} == {"dequantised"}


def test_odd_rows_are_refused_before_anything_changes() -> None:
    model = tiny_llama(intermediate_size=80)
    with pytest.raises(QuantError, match="multiple of 32"):
        quantize(model, "q8_0")
    assert not any(isinstance(m, QuantLinear) for m in model.modules())
    quantize(model, {"recipe": "q8_0", "rules": [{"match": "*.down_proj", "weight": "none"}]})
    assert sum(isinstance(m, QuantLinear) for m in model.modules()) == 12
