"""Stacked experts and Conv1D: quantised storage, forward and backward, and everything back as it was."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers import tiny_model, tiny_tokenizer
from torch import nn

from lumen.models.config import ModelConfig
from lumen.models.load import load_model
from lumen.quant import dequantize, quantize
from lumen.quant.conv import QuantConv1D
from lumen.quant.experts import QuantExperts, QuantStack
from lumen.quant.modules import is_experts
from lumen.quant.stream import Stream

MOE = ["mixtral", "qwen3_moe"]
IDS = torch.arange(5, 29)[None].repeat(2, 1)


def gradients(model: Any) -> dict[str, torch.Tensor]:
    """Gradients of a loss with random weights on the logits."""
    model.zero_grad()
    logits = model(input_ids=IDS).logits
    logits.backward(torch.randn(logits.shape, generator=torch.Generator().manual_seed(1)).to(logits.dtype))
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def describe(model: nn.Module) -> list[tuple[str, type, list[str], list[str]]]:
    return [(n, type(m), list(m._parameters), list(m._buffers)) for n, m in model.named_modules()]


def round_trip(weight: torch.Tensor, spec: str) -> torch.Tensor:
    """Each expert's matrix through the format, by itself, from the public verb."""
    from lumen.quant import quantize_tensor

    return torch.stack([quantize_tensor(w, spec).dequantize() for w in weight])


@pytest.mark.parametrize("spec", ["nf4+dq", "int8", "int4:group16", "mxfp8_e4m3"])
@pytest.mark.parametrize("architecture", MOE)
def test_frozen_experts_equal_the_dequantised_model(architecture: str, spec: str) -> None:
    """Forward and the gradient that passes through the experts, against plain weights that went through the format."""
    reference = tiny_model(architecture).requires_grad_(False)
    model = copy.deepcopy(reference)
    report = quantize(model, {"weight": spec})
    names = {x.name for x in report.layers}
    assert "model.layers.0.mlp.experts.gate_up_proj" in names and "model.layers.1.mlp.experts.down_proj" in names
    assert not any(n.endswith((".gate", "router")) for n in names)
    assert any("gate" in n and why == "router" for n, why in report.skipped.items())
    for name, module in reference.named_modules():
        if is_experts(module):
            for part in ("gate_up_proj", "down_proj"):
                getattr(module, part).data = round_trip(getattr(module, part).data, spec)
        elif isinstance(module, nn.Linear) and f"{name}" in names:
            module.weight.data = round_trip(module.weight.data[None], spec)[0]
    for m in (model, reference):
        m.model.embed_tokens.weight.requires_grad_(True)
    torch.testing.assert_close(model(input_ids=IDS).logits, reference(input_ids=IDS).logits, rtol=1e-4, atol=1e-5)
    got, want = gradients(model), gradients(reference)
    assert set(got) == {"model.embed_tokens.weight"}
    torch.testing.assert_close(
        got["model.embed_tokens.weight"], want["model.embed_tokens.weight"], rtol=1e-3, atol=1e-5
    )
    experts = model.model.layers[0].mlp.experts
    assert experts.gate_up_proj._parameters["weight"].dtype.itemsize == 1
    assert sum(x.bytes_per_parameter for x in report.layers) / len(report.layers) < 1.6


@pytest.mark.parametrize("recipe", ["int8", "mxfp8", "nf4", "mxfp4"])
def test_trained_experts_get_gradients(recipe: str) -> None:
    """Masters: close to the dense gradients, for every expert that saw tokens; a step changes the codes."""
    reference = tiny_model("mixtral")
    model = copy.deepcopy(reference)
    quantize(model, recipe)
    got, want = gradients(model), gradients(reference)
    key = "model.layers.0.mlp.experts.gate_up_proj"
    ours, theirs = got[f"{key}.weight"], want[key]
    assert ours.shape == theirs.shape
    similar = torch.nn.functional.cosine_similarity(ours.flatten(), theirs.flatten(), dim=0)
    assert similar > (0.98 if recipe in ("int8", "mxfp8") else 0.6)
    before = model(input_ids=IDS).logits.detach()
    torch.optim.SGD(model.parameters(), lr=0.5).step()
    assert not torch.allclose(before, model(input_ids=IDS).logits)


def test_histories_are_refused_by_name() -> None:
    from lumen.core import QuantError

    with pytest.raises(QuantError, match="not built for stacked experts"):
        quantize(tiny_model("mixtral"), "fp8-delayed")


def test_unquantised_twin_is_exact() -> None:
    """Our grouped forward with dense masters gives transformers' own result: the routing arithmetic is the same."""
    reference = tiny_model("qwen3_moe")
    model = copy.deepcopy(reference)
    quantize(model, {"saved_input": "int8:row"})  # wraps every stack, quantises nothing of forward
    assert isinstance(model.model.layers[0].mlp.experts, QuantExperts)
    torch.testing.assert_close(model(input_ids=IDS).logits, reference(input_ids=IDS).logits)


@pytest.mark.parametrize("architecture", [*MOE, "gpt2", "gpt_oss"])
@pytest.mark.parametrize("recipe", ["nf4", "int8"])
@pytest.mark.parametrize("frozen", [True, False])
def test_dequantize_restores_everything(architecture: str, recipe: str, frozen: bool) -> None:
    model = build(architecture)
    before, keys = describe(model), list(model.state_dict())
    values = {n: p.detach().clone() for n, p in model.named_parameters()}
    identities = {n: id(p) for n, p in model.named_parameters()}
    report = quantize(model, recipe, frozen=frozen)
    assert len(report.layers) >= 8
    quantised = copy.deepcopy(model)(input_ids=IDS).logits
    dequantize(model)
    assert describe(model) == before and list(model.state_dict()) == keys
    names = {x.name for x in report.layers} | {f"{x.name}.weight" for x in report.layers}
    for name, parameter in model.named_parameters():
        assert parameter.shape == values[name].shape, name
        if not (frozen and name in names):
            assert id(parameter) == identities[name] and torch.equal(parameter, values[name]), name
    if frozen and recipe == "nf4":
        torch.testing.assert_close(model(input_ids=IDS).logits, quantised, rtol=1e-4, atol=1e-4)


def build(architecture: str) -> Any:
    if architecture != "gpt_oss":
        return tiny_model(architecture)
    from transformers import AutoModelForCausalLM, GptOssConfig

    torch.manual_seed(0)
    config = GptOssConfig(
        vocab_size=len(tiny_tokenizer()), hidden_size=32, intermediate_size=32, num_hidden_layers=2, head_dim=8,
        num_attention_heads=4, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, pad_token_id=3,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config).eval()


def test_transposed_experts_with_biases_run() -> None:
    """gpt-oss keeps [E, K, N], biases and a clamped gate; int8 storage stays close, and the shapes come back."""
    reference = build("gpt_oss").requires_grad_(False)
    for module in reference.modules():
        if is_experts(module):
            nn.init.normal_(module.gate_up_proj_bias, std=0.1)
    model = copy.deepcopy(reference)
    quantize(model, "int8-weight-only")
    got, want = model(input_ids=IDS).logits, reference(input_ids=IDS).logits
    assert torch.nn.functional.cosine_similarity(got.flatten(), want.flatten(), dim=0) > 0.999
    stack = model.model.layers[0].mlp.experts.gate_up_proj
    assert isinstance(stack, QuantStack) and stack.transposed and stack.shape == (4, 64, 32)


@pytest.mark.parametrize("recipe", ["nf4", "int8", "int8-weight-only"])
def test_conv1d(recipe: str) -> None:
    """GPT-2: the same numbers as nn.Linear layers of the transposed weights."""
    model = tiny_model("gpt2").requires_grad_(False)
    plain = nn.Sequential(nn.Linear(32, 96)).requires_grad_(False)
    conv = model.transformer.h[0].attn.c_attn
    plain[0].weight.data, plain[0].bias.data = conv.weight.data.t().contiguous(), conv.bias.data
    quantize(model, recipe)
    quantize(plain, recipe)
    layer = model.transformer.h[0].attn.c_attn
    assert isinstance(layer, QuantConv1D)
    x = torch.randn(3, 7, 32, requires_grad=True)
    y, z = layer(x), plain(x)
    torch.testing.assert_close(y, z)
    dy = torch.randn_like(y)
    torch.testing.assert_close(torch.autograd.grad(y, x, dy)[0], torch.autograd.grad(z, x, dy)[0])


def test_trained_conv1d_and_dense_state_dicts() -> None:
    reference = tiny_model("gpt2", seed=3)
    model = tiny_model("gpt2")
    quantize(model, "int8")
    model.load_state_dict(reference.state_dict())
    got, want = gradients(model), gradients(reference)
    key = "transformer.h.0.mlp.c_fc.weight"
    assert got[key].shape == want[key].shape == (32, 64)
    assert torch.nn.functional.cosine_similarity(got[key].flatten(), want[key].flatten(), dim=0) > 0.99
    frozen = tiny_model("gpt2").requires_grad_(False)
    quantize(frozen, "int8-weight-only")
    frozen.load_state_dict(reference.state_dict())
    torch.testing.assert_close(frozen(input_ids=IDS).logits, reference(input_ids=IDS).logits, rtol=0.05, atol=0.02)


@pytest.mark.parametrize("architecture", [*MOE, "gpt2"])
def test_streaming_and_saving(architecture: str, tmp_path: Path) -> None:
    """Experts that lie one by one in the file are merged, then become codes; a quantised state dict loads back."""
    tiny_model(architecture).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    config = ModelConfig(model_name_or_path=str(tmp_path))
    streamed = load_model(config, device="cpu", stream=Stream("nf4")).model
    first = load_model(config, device="cpu").model
    quantize(first, "nf4", frozen=True)
    a, b = streamed.state_dict(), first.state_dict()
    assert set(a) == set(b) and all(torch.equal(a[k].float(), b[k].float()) for k in a)
    other = tiny_model(architecture, seed=7)
    quantize(other, "nf4", frozen=True)
    other.load_state_dict(a)
    assert torch.equal(other(input_ids=IDS).logits, streamed(input_ids=IDS).logits)
    moved = copy.deepcopy(first).to(torch.bfloat16)
    assert torch.isfinite(moved(input_ids=IDS).logits.float()).all()
    assert set(moved.state_dict()) == set(b)
