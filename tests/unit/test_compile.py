"""Compiled decoder layers compute what the layers compute, and leave names alone."""

from __future__ import annotations

import pytest
import torch
from tests.helpers.tiny import tiny_llama

from lumen.core import log
from lumen.models import compile as compiling


def test_compiled_equals_eager_and_is_taken_back() -> None:
    if compiling.missing_compiler("cpu"):
        pytest.skip("no C++ compiler on this machine")
    model = tiny_llama()
    keys = list(model.state_dict())
    ids = torch.arange(2 * 19).view(2, 19) % 300

    def loss_and_gradients() -> tuple[torch.Tensor, list[torch.Tensor]]:
        model.zero_grad()
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        return loss.detach(), [p.grad.clone() for p in model.parameters()]

    expected, expected_grads = loss_and_gradients()
    undo = compiling.compile_layers(model, "on")
    loss, grads = loss_and_gradients()
    assert torch.allclose(loss, expected, rtol=1e-5)
    for found, wanted in zip(grads, expected_grads, strict=True):
        assert torch.allclose(found, wanted, rtol=1e-4, atol=1e-6)
    assert list(model.state_dict()) == keys
    assert all(layer._compiled_call_impl is not None for layer in model.model.layers)
    undo()
    assert all(layer._compiled_call_impl is None for layer in model.model.layers)


def test_short_runs_and_missing_compilers_stay_eager_and_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_llama()
    log.forget_notes()
    compiling.compile_layers(model, "auto", steps=1)
    monkeypatch.setattr(compiling, "missing_compiler", lambda device: "no C++ compiler")
    compiling.compile_layers(model, "on")
    compiling.compile_layers(model, "off")
    assert all(layer._compiled_call_impl is None for layer in model.model.layers)
    assert ["would not pay" in log.notes()[0], "no C++ compiler" in log.notes()[1]] == [True, True]
    assert len(log.notes()) == 2


def test_a_compiler_that_fails_leaves_the_layers_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    if compiling.missing_compiler("cpu"):
        pytest.skip("no C++ compiler on this machine")
    import torch._inductor.compile_fx as inductor

    def broken(*args: object, **kwargs: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(inductor, "compile_fx", broken)
    model = tiny_llama()
    ids = torch.arange(11)[None]
    expected = model(input_ids=ids).logits
    torch._dynamo.reset()
    log.forget_notes()
    compiling.compile_layers(model, "on")
    assert torch.equal(model(input_ids=ids).logits, expected)
    assert "no space left" in log.notes()[0] and len(log.notes()) == 1
    assert all(layer._compiled_call_impl is None for layer in model.model.layers)


def test_frozen_embeddings_do_not_cost_a_second_graph() -> None:
    if compiling.missing_compiler("cpu"):
        pytest.skip("no C++ compiler on this machine")
    model = tiny_llama()
    model.model.embed_tokens.weight.requires_grad_(False)
    model.lm_head.weight.requires_grad_(False)
    ids = torch.arange(13)[None]
    model(input_ids=ids, use_cache=False).logits.square().sum().backward()
    expected = [p.grad.clone() for p in model.parameters() if p.requires_grad]
    model.zero_grad()
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiling.compile_layers(model, "on")
    model(input_ids=ids, use_cache=False).logits.square().sum().backward()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    found = [p.grad for p in model.parameters() if p.requires_grad]
    for mine, wanted in zip(found, expected, strict=True):
        assert torch.allclose(mine, wanted, rtol=1e-3, atol=1e-5)
