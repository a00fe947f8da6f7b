"""Quantised models inside a loop that knows nothing of Lumen: the losses of plain fake quantisation.

Equal losses over several steps show at once that the quantised products ran (high precision gives other losses), and
that each optimizer step refreshed the codes of the weights (stale codes would fall behind after one step).
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tests.helpers import tiny_llama
from tests.helpers.fake_quant import fake_quantise

from lumen.kernels import trace
from lumen.quant import QuantLinear, dequantize, quantize

STEPS = 6


def batches(count: int = STEPS) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(5, 60, (2, 16), generator=generator) for _ in range(2)]
    return [rows[i % 2] for i in range(count)]


def with_lora(model: Any) -> Any:
    torch.manual_seed(1)
    return get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules="all-linear"))


def losses(model: Any, *, make: Any = torch.optim.AdamW, lr: float = 5e-3) -> list[float]:
    """A bare loop: loss, backward, clip, step."""
    model.train()
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = make(trainable, lr=lr)
    result = []
    for ids in batches():
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trainable, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        result.append(loss.item())
    return result


def distance(one: list[float], other: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


def pair(recipe: str) -> tuple[Any, Any, Any]:
    """The same model quantised by Lumen, fake-quantised, and in high precision."""
    ours, fake, plain = tiny_llama(), tiny_llama(), tiny_llama()
    quantize(ours, recipe, frozen=recipe == "nf4")
    fake_quantise(fake, recipe)
    models = (ours, fake, plain)
    return tuple(with_lora(m) for m in models) if recipe == "nf4" else models  # type: ignore[return-value]


@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.SGD])
@pytest.mark.parametrize("recipe", ["int8", "fp8", "nf4"])
def test_bare_loop_equals_fake_quantisation(recipe: str, make: Any) -> None:
    lr = 5e-3 if make is torch.optim.AdamW else 0.5
    got, fake, plain = (losses(model, make=make, lr=lr) for model in pair(recipe))
    assert got[-2] < got[0] or recipe == "nf4"  # adapters of a random model learn slowly
    assert distance(got, fake) < 5e-4
    assert distance(got, fake) < 0.1 * distance(got, plain), "the losses are those of high precision"


def test_codes_follow_every_step() -> None:
    """Fails where the cache of weight codes outlives a step: fused, foreach and single-tensor steps are all seen."""
    for options in ({"foreach": True}, {"foreach": False}, {"fused": True}):
        model = torch.nn.Sequential(torch.nn.Linear(16, 16, bias=False))
        quantize(model, "int8")
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, **options)
        for _ in range(3):
            x = torch.randn(4, 16)
            model(x).backward(torch.randn(4, 16))
            optimizer.step()
            fresh = torch.nn.Sequential(torch.nn.Linear(16, 16, bias=False))
            quantize(fresh, "int8")
            fresh.load_state_dict(model.state_dict())
            assert torch.equal(model(x), fresh(x))


def test_the_integer_products_ran() -> None:
    """14 layers, three products each; the codes of 14 weights are made once for a step of two micro-batches."""
    model = tiny_llama()
    quantize(model, "int8")
    with trace() as calls:
        model(input_ids=batches()[0], labels=batches()[0]).loss.backward()
    assert [c[:2] for c in calls] == [("int8_matmul", "int8")] * 14 * 3


@pytest.mark.parametrize("recipe", ["int8", "fp8"])
def test_what_a_loop_saves_loads_in_plain_transformers(recipe: str, tmp_path: Any) -> None:
    """A trained master is an ordinary weight on the disk; quantised again it answers as before."""
    from transformers import AutoModelForCausalLM

    model = tiny_llama()
    quantize(model, recipe)
    losses(model)
    model.eval().save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert {p.dtype for p in again.parameters()} == {torch.float32}
    ids = batches()[0]
    plain = copy.deepcopy(model)
    dequantize(plain)
    assert torch.equal(again(input_ids=ids).logits, plain(input_ids=ids).logits)
    quantize(again, recipe)
    assert torch.equal(again(input_ids=ids).logits, model(input_ids=ids).logits)
    assert sum(isinstance(m, QuantLinear) for m in again.modules()) == 14
