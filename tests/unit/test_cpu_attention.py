"""The C++ attention against its reference: head sizes, grouped heads, segments, windows, strides, gradients."""

from __future__ import annotations

import pytest
import torch
from tests.helpers.tiny import tiny_model
from tests.unit.test_attention import batch_of, decoder_output
from torch import Tensor

from lumen.kernels import trace
from lumen.kernels.cpu import library
from lumen.kernels.cpu.attention import native_attention
from lumen.kernels.reference.attention import causal_attention
from lumen.models.attention import NATIVE, use_native_attention

pytestmark = pytest.mark.skipif(bool(library.missing()), reason=f"no C++ kernels here: {library.missing()}")


def close(found: Tensor, wanted: Tensor, tolerance: float = 0.006) -> bool:
    """Relative distance of whole tensors; bf16 rounds each value to 0.2 % on average."""
    return bool((found.float() - wanted.float()).norm() <= tolerance * wanted.float().norm() + 1e-6)


@pytest.mark.parametrize(
    ("heads", "groups", "length", "size", "examples", "window"),
    [
        (1, 1, 1, 16, 0, None),
        (2, 1, 5, 16, 1, None),
        (4, 2, 37, 32, 3, None),
        (3, 1, 48, 64, 0, None),
        (9, 3, 200, 64, 3, None),
        (6, 2, 131, 80, 2, None),
        (2, 2, 97, 96, 90, None),
        (2, 1, 150, 128, 2, 20),
        (2, 1, 70, 256, 2, 5),
        (4, 4, 513, 64, 5, 1),
    ],
)
def test_equals_the_reference(
    heads: int, groups: int, length: int, size: int, examples: int, window: int | None
) -> None:
    generator = torch.Generator().manual_seed(length)
    inputs = [
        torch.randn(2, length, n, size, generator=generator).bfloat16().transpose(1, 2).requires_grad_()
        for n in (heads, groups, groups)
    ]
    segments = None
    if examples:
        segments = (torch.arange(length) * examples // length + 1).expand(2, -1).clone()
        segments[1, length * 2 // 3 :] = 0
    upstream = torch.randn(2, length, heads, size, generator=generator).bfloat16()
    with trace() as ran:
        found = native_attention(*inputs, segments, scale=0.2, window=window)
    assert ran == [("attention", "bf16", "cpu")]
    exact = [x.detach().float().requires_grad_() for x in inputs]
    wanted = causal_attention(*exact, segments, scale=0.2, window=window, block=None).transpose(1, 2)
    assert close(found, wanted)
    grads = torch.autograd.grad(found, inputs, upstream)
    for mine, reference in zip(grads, torch.autograd.grad(wanted, exact, upstream.float()), strict=True):
        tiny = 1e-2 if length == 1 or window == 1 else 0.0  # one key: its weight is 1 and its gradient rounding alone
        assert close(mine, reference) or (mine.float() - reference).abs().max() < tiny


def test_large_scores_and_any_strides() -> None:
    """Scores of hundreds neither overflow nor lose the largest; a view whose last stride is not 1 is read right."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 32, 40, generator=generator).bfloat16() * 20 for _ in range(3))
    views = [x.transpose(2, 3) for x in (q, k, v)]
    wanted = causal_attention(*(x.float() for x in views), scale=1.0, block=None).transpose(1, 2)
    found = native_attention(*views, None, scale=1.0)
    assert torch.isfinite(found).all() and close(found, wanted)


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "mistral", "gemma3_text"])
def test_packed_equals_separate_in_a_model(architecture: str) -> None:
    model = tiny_model(architecture, dtype=torch.bfloat16, head_dim=16, attn_implementation="sdpa")
    assert use_native_attention(model)
    assert model.config._attn_implementation == NATIVE
    sizes = [21, 1, 30]
    packed = batch_of([sizes, [40]], 64)
    with trace() as ran:
        logits = decoder_output(model, packed)
    assert ("attention", "bf16", "cpu") in ran
    model.set_attn_implementation("eager")
    start = 0
    for size in sizes:
        alone = model(input_ids=packed.input_ids[:1, start : start + size], use_cache=False).logits
        assert close(logits[:1, start : start + size], alone, 0.03)
        start += size


def test_models_it_cannot_take_keep_their_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not use_native_attention(tiny_model("llama", attn_implementation="sdpa"))  # fp32
    assert not use_native_attention(tiny_model("llama", dtype=torch.bfloat16, attn_implementation="sdpa"))  # size 8
    wide = tiny_model("llama", dtype=torch.bfloat16, head_dim=16, attn_implementation="sdpa")
    monkeypatch.setenv("LUMEN_NATIVE", "off")
    assert "LUMEN_NATIVE" in library.missing()
    assert not use_native_attention(wide)
    assert wide.config._attn_implementation == "sdpa"


def test_generation_with_a_cache_still_works() -> None:
    model = tiny_model("llama", dtype=torch.bfloat16, head_dim=16, attn_implementation="sdpa")
    ids = torch.arange(9)[None] + 4
    expected = model.generate(ids, max_new_tokens=5, do_sample=False)
    assert use_native_attention(model)
    assert torch.equal(model.generate(ids, max_new_tokens=5, do_sample=False), expected)


def test_gradient_checkpointing_gives_the_same_gradients() -> None:
    model = tiny_model("llama", dtype=torch.bfloat16, head_dim=16, attn_implementation="sdpa").train()
    assert use_native_attention(model)
    batch = batch_of([[20, 11]], 31)

    def gradients() -> list[Tensor]:
        model.zero_grad()
        decoder_output(model, batch).float().square().sum().backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    plain = gradients()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    assert all(torch.equal(a, b) for a, b in zip(plain, gradients(), strict=True))
