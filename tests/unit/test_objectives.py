"""The chunked loss equals the plain one in value and gradient, for any head and architecture; packing isolates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from tests.helpers import TINY_ARCHITECTURES, tiny_llama, tiny_model
from torch import nn
from torch.nn import functional as F

from lumen.core.errors import ConfigError
from lumen.objectives import loss_sum, objective
from lumen.objectives.head import head_plan
from lumen.objectives.linear_cross_entropy import chunk_rows, head_cross_entropy, linear_cross_entropy
from lumen.objectives.sft import shifted_targets


@dataclass
class Rows:
    input_ids: torch.Tensor
    labels: torch.Tensor
    position_ids: torch.Tensor
    segment_ids: torch.Tensor
    packed: bool


def make_rows(rows: list[list[int]], *, length: int | None = None, seed: int = 0, prompt: int = 1) -> Rows:
    """Each row is a list of segment lengths; the first `prompt` tokens of a segment are not learned."""
    generator = torch.Generator().manual_seed(seed)
    length = length or max(map(sum, rows))
    ids = torch.full((len(rows), length), 3)
    labels = torch.full((len(rows), length), -100)
    positions, segments = torch.zeros_like(ids), torch.zeros_like(ids, dtype=torch.int32)
    for b, row in enumerate(rows):
        start = 0
        for number, n in enumerate(row, 1):
            ids[b, start : start + n] = torch.randint(4, 300, (n,), generator=generator)
            labels[b, start + prompt : start + n] = ids[b, start + prompt : start + n]
            positions[b, start : start + n] = torch.arange(n)
            segments[b, start : start + n] = number
            start += n
    return Rows(ids, labels, positions, segments, any(len(row) > 1 for row in rows))


def pick(batch: Rows, b: int, start: int, stop: int) -> Rows:
    part = (slice(b, b + 1), slice(start, stop))
    return Rows(
        batch.input_ids[part],
        batch.labels[part],
        batch.position_ids[part],
        torch.ones(1, stop - start, dtype=torch.int32),
        False,
    )


def plain_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(
        logits[:, :-1].reshape(-1, logits.shape[-1]).float(), labels[:, 1:].reshape(-1), reduction="sum"
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("scale", "softcap"), [(1.0, None), (0.25, None), (1.0, 5.0), (2.0, 3.0)])
@pytest.mark.parametrize("bias", [False, True])
def test_chunked_equals_plain(dtype: torch.dtype, scale: float, softcap: float | None, bias: bool) -> None:
    torch.manual_seed(0)
    hidden, head = torch.randn(37, 16), nn.Linear(16, 101, bias=bias)
    targets = torch.randint(0, 101, (37,))
    hidden, head = hidden.to(dtype), head.to(dtype)

    def reference(h: torch.Tensor) -> torch.Tensor:
        z = head(h).float() * scale
        return F.cross_entropy(z if softcap is None else softcap * torch.tanh(z / softcap), targets, reduction="sum")

    parameters = list(head.parameters())
    a = hidden.clone().requires_grad_()
    expected = reference(a)
    wanted = torch.autograd.grad(expected * 0.7, [a, *parameters])
    b = hidden.clone().requires_grad_()
    options: dict[str, Any] = {"scale": scale, "softcap": softcap, "rows": 16}
    found, correct = linear_cross_entropy(b, head.weight, head.bias, targets, **options)
    got = torch.autograd.grad(found * 0.7, [b, *parameters])
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    torch.testing.assert_close(found, expected, **tolerance)
    for x, y in zip(got, wanted, strict=True):
        torch.testing.assert_close(x, y, **tolerance)
    assert correct == (head(hidden).argmax(-1) == targets).sum()
    general, general_correct = head_cross_entropy(head, b, targets, vocabulary=101, **options)
    torch.testing.assert_close(general, expected, **tolerance)
    assert general_correct == correct
    for x, y in zip(torch.autograd.grad(general * 0.7, [b, *parameters]), wanted, strict=True):
        torch.testing.assert_close(x, y, **tolerance)


def test_a_frozen_head_gets_no_gradient_and_no_buffer() -> None:
    head = nn.Linear(8, 50, bias=False).requires_grad_(False)
    hidden = torch.randn(5, 8, requires_grad=True)
    loss, _ = linear_cross_entropy(hidden, head.weight, None, torch.arange(5))
    assert loss.grad_fn.saved_tensors[1] is None  # type: ignore[union-attr]
    loss.backward()
    assert head.weight.grad is None and hidden.grad is not None


def test_no_labelled_row_is_zero_and_differentiable() -> None:
    model = tiny_llama()
    batch = make_rows([[6]])
    batch.labels.fill_(-100)
    sums = loss_sum(model, batch)
    sums.loss_sum.backward()
    assert sums.num_loss_tokens == 0 and sums.loss_sum.item() == 0


def test_full_logits_are_never_held() -> None:
    """The largest tensor made with a vocabulary of 50,000 is one chunk, not all 2,000 rows."""
    biggest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            nonlocal biggest
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor):
                biggest = max(biggest, out.numel())
            return out

    hidden = torch.randn(2000, 4, requires_grad=True)
    weight = torch.randn(50_000, 4)
    with Watch():
        linear_cross_entropy(hidden, weight, None, torch.zeros(2000, dtype=torch.int64))[0].backward()
    assert 0 < biggest <= chunk_rows(50_000) * 50_000 < 2000 * 50_000 / 2


def test_shift() -> None:
    labels = torch.tensor([[-100, 5, 6, -100], [-100, -100, -100, 9]])
    positions, targets = shifted_targets(labels)
    assert positions.tolist() == [0, 1, 6] and targets.tolist() == [5, 6, 9]


@pytest.mark.parametrize("architecture", [*TINY_ARCHITECTURES, "cohere", "granite"])
def test_any_architecture(architecture: str) -> None:
    """Loss and gradients equal those from the model's own logits; softcapping and logit scales included."""
    if architecture in ("cohere", "granite"):
        extra = {"logit_scale": 0.0625} if architecture == "cohere" else {"logits_scaling": 4.0}
        TINY_ARCHITECTURES.setdefault(architecture, extra)
        try:
            model = tiny_model(architecture)
        finally:
            TINY_ARCHITECTURES.pop(architecture)
    else:
        model = tiny_model(architecture)
    batch = make_rows([[9], [14]])
    mask = (batch.segment_ids > 0).long()
    expected = plain_loss(model(input_ids=batch.input_ids, attention_mask=mask).logits, batch.labels)
    expected.backward()
    wanted = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    sums = loss_sum(model, batch)
    sums.loss_sum.backward()
    assert head_plan(model).decoder is not None and head_plan(model).plain
    assert sums.num_loss_tokens == 8 + 13
    torch.testing.assert_close(sums.loss_sum, expected, rtol=1e-5, atol=1e-4)
    for name, parameter in model.named_parameters():
        if name in wanted:
            torch.testing.assert_close(parameter.grad, wanted[name], rtol=1e-3, atol=1e-4, msg=name)


class Twisted(nn.Module):
    """A model whose logits are not head(decoder(ids)) * scale."""

    base_model_prefix = "model"

    def __init__(self) -> None:
        super().__init__()
        self.inner = tiny_llama()
        self.model, self.config = self.inner.model, self.inner.config

    def get_output_embeddings(self) -> nn.Module:
        return self.inner.lm_head

    def forward(self, **inputs: Any) -> Any:
        out = self.inner(**inputs)
        out.logits = out.logits + 3 * torch.arange(out.logits.shape[-1]) / 320
        return out


def test_an_unknown_head_takes_the_full_logits(capsys: pytest.CaptureFixture[str]) -> None:
    model, batch = Twisted(), make_rows([[9], [14]])
    expected = plain_loss(model(input_ids=batch.input_ids).logits, batch.labels)
    torch.testing.assert_close(loss_sum(model, batch).loss_sum, expected, rtol=1e-5, atol=1e-4)
    assert "full logits" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["lora", "lora on head", "head trained", "dropout on head"])
@pytest.mark.parametrize("tied", [False, True])
def test_peft_heads(kind: str, tied: bool) -> None:
    from peft import LoraConfig, get_peft_model

    targets = ["q_proj", "lm_head"] if "head" in kind and kind != "head trained" else ["q_proj"]
    config = LoraConfig(
        r=4,
        target_modules=targets,
        modules_to_save=["lm_head"] if kind == "head trained" else None,
        lora_dropout=0.3 if "dropout" in kind else 0.0,
        init_lora_weights=False,
    )
    model = get_peft_model(tiny_llama(tie_word_embeddings=tied), config).eval()
    batch = make_rows([[9], [14]])
    expected = plain_loss(model(input_ids=batch.input_ids).logits, batch.labels)
    expected.backward()
    wanted = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    sums = loss_sum(model, batch)
    sums.loss_sum.backward()
    assert head_plan(model).decoder is not None
    torch.testing.assert_close(sums.loss_sum, expected, rtol=1e-5, atol=1e-4)
    found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert found.keys() == wanted.keys()
    for name, grad in found.items():
        torch.testing.assert_close(grad, wanted[name], rtol=1e-3, atol=1e-4, msg=name)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "gemma2", "gemma3_text", "mistral", "gpt2", "mixtral"])
def test_packed_equals_separate(architecture: str, attention: str) -> None:
    """Two rows of packed segments against each segment alone; the windows of 16 are shorter than the segments."""
    model = tiny_model(architecture, **({"sliding_window": 16} if architecture == "mistral" else {}))
    if attention == "sdpa" and not model._supports_sdpa:
        pytest.skip(f"{architecture} caps its attention scores, which sdpa cannot")
    model.set_attn_implementation(attention)
    batch = make_rows([[3, 40, 5], [24, 20]], length=50)
    packed = loss_sum(model, batch)
    separate = 0.0
    for b, row in enumerate([[3, 40, 5], [24, 20]]):
        start = 0
        for n in row:
            separate += loss_sum(model, pick(batch, b, start, start + n)).loss_sum.item()
            start += n
    assert packed.loss_sum.item() == pytest.approx(separate, rel=1e-5)
    alone = loss_sum(model, pick(batch, 0, 3, 43))
    alone.loss_sum.backward()
    assert alone.num_loss_tokens == 39


def test_stages() -> None:
    assert objective("sft") is objective("pt")
    with pytest.raises(ConfigError, match="'dpo' is not built"):
        objective("dpo")
