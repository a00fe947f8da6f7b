"""One optimizer step: every labelled token weighs the same; what is not finite is skipped and named."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tests.helpers import tiny_llama, tiny_tokenizer

from lumen.core.errors import LumenError
from lumen.data.batch import Batch
from lumen.data.examples import Example, ExampleStore
from lumen.data.loader import Loader
from lumen.objectives import loss_sum
from lumen.optim import make_optimizer, parameter_groups
from lumen.trainer.config import RunConfig
from lumen.trainer.evaluate import held_out_loss
from lumen.trainer.guard import first_nonfinite_module
from lumen.trainer.run import Run
from lumen.trainer.step import Stepper, fetch


def store_of(lengths: list[int], *, seed: int = 0) -> ExampleStore:
    generator = np.random.default_rng(seed)
    examples = []
    for n in lengths:
        ids = generator.integers(4, 300, n).astype(np.int32)
        labels = ids.copy()
        labels[: max(1, n // 3)] = -100
        examples.append(Example(input_ids=ids, labels=labels))
    return ExampleStore.from_examples(examples)


def make_run(
    lengths: list[int],
    batch_size: int,
    accumulation: int,
    *,
    model: Any = None,
    dtype: torch.dtype = torch.float32,
    **values: Any,
) -> Run:
    model = tiny_llama(dtype=dtype) if model is None else model
    config = RunConfig(
        per_device_train_batch_size=batch_size, gradient_accumulation_steps=accumulation, device="cpu", **values
    )
    groups = parameter_groups(model, lr=1e-2, weight_decay=0.0)
    optimizer = make_optimizer("adamw_torch", groups, lr=1e-2)
    loader = Loader(store_of(lengths), batch_size, 3, shuffle=False, pad_token_id=3)
    return Run(config, model, tiny_tokenizer(), torch.device("cpu"), dtype, optimizer, loader)


def stepper(run: Run) -> Stepper:
    return Stepper(run, loss_sum, lambda step: 1.0)


def never() -> bool:
    return False


def test_batch_2x1_equals_1x2_with_rows_of_3_and_50_tokens() -> None:
    """Loss, gradient norm and weights after three steps, fp32, relative 1e-6."""
    outcomes = []
    for batch_size, accumulation in ((2, 1), (1, 2)):
        run = make_run([3, 50, 50, 3, 12, 7], batch_size, accumulation)
        step = stepper(run)
        results = [step(i, never) for i in range(3)]
        outcomes.append(([(r.loss, r.grad_norm, r.loss_tokens) for r in results if r], run.model))
    (first, one), (second, two) = outcomes
    for a, b in zip(first, second, strict=True):
        assert a == pytest.approx(b, rel=1e-6)
    for p, q in zip(one.parameters(), two.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=2e-5)  # Adam divides by sqrt(v): tiny gradients amplify


def test_gradients_2x1_equal_1x2_before_adam() -> None:
    gradients = []
    for batch_size, accumulation in ((2, 1), (1, 2)):
        run = make_run([3, 50], batch_size, accumulation, max_grad_norm=0.0)
        run.optimizer.step = lambda closure=None: gradients.append(  # type: ignore[method-assign,assignment]
            [p.grad.clone() for p in run.model.parameters()]  # noqa: B023
        )
        stepper(run)(0, never)
    for a, b in zip(*gradients, strict=True):
        assert (a - b).norm() <= 1e-6 * a.norm()


def test_the_last_partial_step_divides_by_its_own_tokens() -> None:
    run = make_run([9, 9, 9], 1, 2)
    step = stepper(run)
    full, partial = step(0, never), step(1, never)
    assert full and partial
    assert (full.loss_tokens, partial.loss_tokens) == (12, 6)
    assert fetch(run.train_loader, 2)[0].num_loss_tokens == 6
    alone = loss_sum(run.model, run.train_loader.next_batch())
    assert partial.loss == pytest.approx(alone.loss_sum.item() / 6, rel=0.2)  # a mean, not half a mean


def test_a_step_interrupted_between_micro_batches_leaves_no_trace() -> None:
    run = make_run([5] * 8, 1, 4)
    step = stepper(run)
    before = {n: p.clone() for n, p in run.model.state_dict().items()}
    random = torch.get_rng_state()
    state = run.train_loader.state()
    torch.rand(3)
    torch.set_rng_state(random)
    assert step(0, lambda: True) is None
    assert run.train_loader.state() == state and torch.equal(torch.get_rng_state(), random)
    assert all(p.grad is None for p in run.model.parameters())
    assert all(torch.equal(p, before[n]) for n, p in run.model.state_dict().items())


class Poison(torch.nn.Module):
    """Passes its input on; makes it NaN (forward) or its gradient NaN (backward) while `armed`."""

    def __init__(self, inner: torch.nn.Module, where: str) -> None:
        super().__init__()
        self.inner, self.where, self.armed = inner, where, True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        if not self.armed:
            return y
        if self.where == "forward":
            return y * float("nan")
        y = y.clone()
        y.register_hook(lambda grad: grad * float("nan"))
        return y


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_non_finite_steps_are_skipped_named_and_limited(where: str, capsys: pytest.CaptureFixture[str]) -> None:
    model = tiny_llama()
    model.model.layers[1].mlp.down_proj = Poison(model.model.layers[1].mlp.down_proj, where)
    poison = model.model.layers[1].mlp.down_proj
    poison.armed = False
    loss_sum(model, Loader(store_of([9]), 1, 0).next_batch())
    poison.armed = True
    run = make_run([9] * 6, 1, 1, model=model, max_nonfinite_steps=3)
    step = stepper(run)
    before = [p.clone() for p in model.parameters()]
    result = step(0, never)
    assert result is not None and not result.applied
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    assert not run.optimizer.state
    said = capsys.readouterr().err
    assert "step 1" in said and "is skipped" in said and "layers.1" in said, said
    step(1, never)
    with pytest.raises(LumenError, match="3 steps in a row") as caught:
        step(2, never)
    assert "learning_rate" in caught.value.fix
    poison.armed = False
    good = step(3, never)
    assert good is not None and good.applied and step.guard.in_a_row == 0 and step.guard.skipped == 3


def test_a_weight_that_is_not_finite_is_named() -> None:
    model = tiny_llama()
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[0, 0] = float("inf")
    found = first_nonfinite_module(model, lambda: torch.zeros((), requires_grad=True))
    assert found == "a weight: model.layers.0.mlp.up_proj.weight"


def test_fp16_overflow_lowers_the_scale_and_is_no_fault() -> None:
    run = make_run([9] * 12, 1, 1, dtype=torch.float16)
    step = stepper(run)
    step.scaler.scale = 2.0**24 * 2.0**10  # far beyond what fp16 gradients hold
    applied = [step(i, never) for i in range(12)]
    assert not applied[0].applied and step.guard.skipped == 0  # type: ignore[union-attr]
    while not (result := step(0, never)).applied:  # type: ignore[union-attr]
        pass
    assert result is not None and torch.isfinite(torch.tensor(result.grad_norm)) and step.scaler.scale < 2.0**24
    assert all(torch.isfinite(p).all() for p in run.model.parameters())


def test_held_out_loss_is_a_mean_over_tokens_not_over_batches() -> None:
    model = tiny_llama()
    store = store_of([3, 50, 20])
    results = [
        held_out_loss(model, Loader(store, size, 0, shuffle=False).one_pass(), loss_sum, torch.device("cpu"))
        for size in (1, 2, 3)
    ]
    one, two, three = (r for r in results if r)
    assert one.tokens == two.tokens == three.tokens
    assert one.loss == pytest.approx(two.loss, rel=1e-6) == pytest.approx(three.loss, rel=1e-6)
    total = sum(loss_sum(model, b).loss_sum.item() for b in Loader(store, 1, 0, shuffle=False).one_pass())
    assert one.loss == pytest.approx(total / one.tokens, rel=1e-6)


def test_evaluation_draws_no_random_number_and_restores_modes() -> None:
    model = tiny_llama(attention_dropout=0.5)
    model.train()
    model.model.layers[0].eval()
    random = torch.get_rng_state()
    batches: list[Batch] = list(Loader(store_of([9]), 1, 0).one_pass())
    first = held_out_loss(model, batches, loss_sum, torch.device("cpu"))
    second = held_out_loss(model, batches, loss_sum, torch.device("cpu"))
    assert first and second and first.loss == second.loss
    assert torch.equal(random, torch.get_rng_state())
    assert model.training and not model.model.layers[0].training and model.model.layers[1].training
    assert held_out_loss(model, batches, loss_sum, torch.device("cpu"), stop=lambda: True) is None


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_checkpointing_with_frozen_embeddings_moves_every_lora_b(dropout: float) -> None:
    from peft import LoraConfig, get_peft_model

    from lumen.memory.checkpointing import apply_checkpointing
    from lumen.memory.config import MemoryConfig

    config = LoraConfig(r=4, target_modules="all-linear", lora_dropout=dropout)
    losses = []
    for on in (False, True):
        torch.manual_seed(0)
        model = get_peft_model(tiny_llama(), config)
        done = apply_checkpointing(model, MemoryConfig(gradient_checkpointing=on), lambda: 0)
        assert done.on is on
        run = make_run([9, 12], 2, 1, model=model)
        before = {n: p.clone() for n, p in model.named_parameters() if "lora_B" in n}
        assert len(before) == 14
        torch.manual_seed(5)
        result = stepper(run)(0, never)
        assert result is not None
        losses.append((result.loss, result.grad_norm))
        still = [n for n, p in model.named_parameters() if "lora_B" in n and torch.equal(p, before[n])]
        assert not still
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_checkpointing_chooses_by_the_memory_that_is_free() -> None:
    from lumen.memory.checkpointing import choose
    from lumen.memory.config import MemoryConfig

    assert choose(MemoryConfig(), lambda: 60, free=100).on
    assert not choose(MemoryConfig(), lambda: 40, free=100).on
    assert not choose(MemoryConfig(disable_gradient_checkpointing=True), lambda: 60, free=100).on
    assert choose(MemoryConfig(gradient_checkpointing=True), lambda: 0, free=100).on
    with pytest.raises(LumenError, match="both set"):
        choose(MemoryConfig(gradient_checkpointing=True, disable_gradient_checkpointing=True), lambda: 0, free=1)
