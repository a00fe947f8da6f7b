"""Lumen's attention against transformers' eager and sdpa: packed, padded, grouped heads, windows, caps, gradients."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.helpers.tiny import tiny_llama, tiny_model
from torch import Tensor

from lumen.kernels.reference.attention import causal_attention
from lumen.models import compile as compiling
from lumen.models.attention import block_mask, model_inputs, use_compiled_attention

NAMES = ["sdpa", "eager", "lumen", "lumen_whole"]


def batch_of(rows: list[list[int]], length: int) -> Any:
    """A batch of rows given as lengths of the examples that share them."""
    ids = torch.zeros(len(rows), length, dtype=torch.long)
    positions, segments = ids.clone(), ids.clone().int()
    for b, row in enumerate(rows):
        start = 0
        for number, size in enumerate(row, 1):
            span = slice(start, start + size)
            ids[b, span] = torch.arange(size) * (number + 3 * b + 5) % 290 + 4
            positions[b, span], segments[b, span] = torch.arange(size), number
            start += size
    packed = any(len(row) > 1 for row in rows)
    return SimpleNamespace(input_ids=ids, position_ids=positions, segment_ids=segments, packed=packed)


@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (3, 1)], ids=str)
@pytest.mark.parametrize(("length", "block"), [(1, 128), (7, None), (37, 16), (48, 16), (130, 128)])
@pytest.mark.parametrize("window", [None, 5])
def test_reference_equals_sdpa_with_gradients(
    heads: tuple[int, int], length: int, block: int | None, window: int | None
) -> None:
    generator = torch.Generator().manual_seed(length)
    shape = [(2, heads[0], length, 8), (2, heads[1], length, 8), (2, heads[1], length, 8)]
    inputs = [torch.randn(s, generator=generator, requires_grad=True) for s in shape]
    segments = (torch.arange(length) * 3 // length + 1).expand(2, -1).clone()
    segments[1, length * 2 // 3 :] = 0
    upstream = torch.randn(shape[0], generator=generator)
    ours = causal_attention(*inputs, segments, scale=0.3, window=window, block=block)
    grads = torch.autograd.grad(ours, inputs, upstream)
    expected = torch.nn.functional.scaled_dot_product_attention(
        *inputs, attn_mask=block_mask(segments, window), scale=0.3, enable_gqa=True
    )
    assert torch.allclose(ours, expected, atol=2e-6)
    for found, wanted in zip(grads, torch.autograd.grad(expected, inputs, upstream), strict=True):
        assert torch.allclose(found, wanted, atol=1e-5)


def decoder_output(model: Any, batch: Any) -> Tensor:
    return model(**model_inputs(batch, model), use_cache=False).logits


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("architecture", ["llama", "qwen3", "mistral", "gemma2", "gemma3_text"])
def test_packed_equals_separate(architecture: str, name: str) -> None:
    if architecture == "gemma2" and name == "sdpa":
        pytest.skip("transformers' sdpa refuses Gemma 2's capped scores")
    model = tiny_model(architecture, attn_implementation="eager")
    model.set_attn_implementation(name)
    sizes = [21, 1, 30]
    packed = batch_of([sizes, [40]], 64)
    logits = decoder_output(model, packed)
    model.set_attn_implementation("eager")
    start = 0
    for size in sizes:
        ids = packed.input_ids[:1, start : start + size]
        alone = model(input_ids=ids, use_cache=False).logits
        assert torch.allclose(logits[:1, start : start + size], alone, atol=2e-5)
        start += size
    alone = model(input_ids=packed.input_ids[1:, :40], use_cache=False).logits
    assert torch.allclose(logits[1:, :40], alone, atol=2e-5)
    assert torch.isfinite(logits).all()


def test_generation_with_a_cache_falls_back() -> None:
    model = tiny_llama()
    ids = torch.arange(9)[None] + 5
    expected = model.generate(ids, max_new_tokens=6, do_sample=False, eos_token_id=None)
    assert use_compiled_attention(model, fixed_length=True)
    assert torch.equal(model.generate(ids, max_new_tokens=6, do_sample=False, eos_token_id=None), expected)


def test_attention_dropout_goes_to_sdpa() -> None:
    model = tiny_llama(attention_dropout=0.5)
    use_compiled_attention(model, fixed_length=True)
    batch = batch_of([[9, 8]], 20)
    exact = decoder_output(model.eval(), batch)
    assert not torch.allclose(decoder_output(model.train(), batch), exact, atol=1e-4)


def test_a_chosen_attention_stays() -> None:
    model = tiny_llama()
    model.set_attn_implementation("eager")
    assert not use_compiled_attention(model, fixed_length=True)
    assert model.config._attn_implementation == "eager"


@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointed"])
def test_compiled_layers_with_own_attention(checkpointing: bool) -> None:
    """Two batches of one shape, one packed and one not; compiled gradients equal eager ones."""
    if compiling.missing_compiler("cpu"):
        pytest.skip("no C++ compiler on this machine")
    model = tiny_llama().train()
    batches = [batch_of([[20, 12], [30]], 32), batch_of([[32], [31]], 32)]

    def gradients() -> list[Tensor]:
        model.zero_grad()
        for batch in batches:
            seen = batch.segment_ids != 0
            decoder_output(model, batch)[seen].square().sum().backward()
        return [p.grad.clone() for p in model.parameters()]

    expected = gradients()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    undo = compiling.compile_layers(model, "on", own_attention=True, fixed_length=True)
    assert model.config._attn_implementation == "lumen"
    for found, wanted in zip(gradients(), expected, strict=True):
        assert torch.allclose(found, wanted, rtol=1e-3, atol=1e-4)
    undo()
