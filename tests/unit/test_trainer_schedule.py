"""Schedules equal transformers'; the number of steps equals HF Trainer's; what happens when."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lumen.core.errors import ConfigError
from lumen.trainer.config import RunConfig
from lumen.trainer.plan import Cadence, every, total_steps
from lumen.trainer.scaler import GROWTH_INTERVAL, LossScaler
from lumen.trainer.schedule import NAMES, make_schedule, warmup_steps

OPTIONS: dict[str, list[dict[str, Any]]] = {
    "cosine": [{}, {"num_cycles": 1.5}],
    "cosine_with_restarts": [{}, {"num_cycles": 3}],
    "cosine_with_min_lr": [{"min_lr_rate": 0.1}, {"min_lr": 1e-4}],
    "polynomial": [{}, {"power": 2.0, "lr_end": 1e-5}],
    "inverse_sqrt": [{}, {"timescale": 20}],
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("total", "warmup"), [(50, 0), (50, 7), (3, 1), (1, 0)])
def test_schedules_equal_transformers(name: str, total: int, warmup: int) -> None:
    from transformers import get_scheduler

    for options in OPTIONS.get(name, [{}]):
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=3e-3)
        reference = get_scheduler(name, optimizer, warmup, total, scheduler_specific_kwargs=dict(options))
        ours = make_schedule(name, total=total, warmup=warmup, lr=3e-3, options=options)
        for step in range(total + 3):
            assert 3e-3 * ours(step) == pytest.approx(reference.get_last_lr()[0], rel=1e-9, abs=1e-15), (name, step)
            optimizer.step()
            reference.step()


def test_schedule_mistakes() -> None:
    with pytest.raises(ConfigError, match="is not built"):
        make_schedule("warmup_stable_decay", total=5, warmup=0, lr=1.0)
    with pytest.raises(ConfigError, match="does not take"):
        make_schedule("cosine", total=5, warmup=0, lr=1.0, options={"powr": 2})
    with pytest.raises(ConfigError, match="lowest learning rate"):
        make_schedule("cosine_with_min_lr", total=5, warmup=0, lr=1.0)


def test_warmup_is_a_number_or_a_share() -> None:
    assert warmup_steps(100, warmup_steps=7, warmup_ratio=0.5) == 7
    assert warmup_steps(100, warmup_steps=0.1) == 10
    assert warmup_steps(21, warmup_ratio=0.1) == 3 == math.ceil(2.1)
    assert warmup_steps(21) == 0


def config(**values: Any) -> RunConfig:
    return RunConfig(**values)


@pytest.mark.parametrize(
    ("batches", "accumulation", "epochs"), [(19, 4, 2), (19, 4, 1.5), (8, 8, 3), (5, 8, 1), (7, 1, 0.4)]
)
def test_total_steps_as_hf_trainer(batches: int, accumulation: int, epochs: float) -> None:
    loader: Any = SimpleNamespace(batches_per_epoch=lambda epoch=0: batches)
    ours = total_steps(config(gradient_accumulation_steps=accumulation, num_train_epochs=epochs), loader)
    per_epoch = max(batches // accumulation + int(batches % accumulation > 0), 1)  # HF's rule, written as it does
    assert ours == math.ceil(epochs * per_epoch)
    assert total_steps(config(max_steps=3), loader) == 3


def test_cadence() -> None:
    cadence = Cadence(config(logging_steps=5, eval_strategy="steps", eval_steps=0.25, save_steps=4), 10)
    assert [s for s in range(1, 11) if cadence.logs(s)] == [5, 10]
    assert [s for s in range(1, 11) if cadence.evaluates(s, False)] == [3, 6, 9]
    assert [s for s in range(1, 11) if cadence.saves(s, False)] == [4, 8]
    by_epoch = Cadence(config(eval_strategy="epoch", save_strategy="epoch", logging_first_step=True), 10)
    assert by_epoch.evaluates(3, True) and not by_epoch.evaluates(3, False)
    assert by_epoch.saves(3, True) and not by_epoch.saves(3, False) and by_epoch.logs(1)
    assert every(0.1, 15) == 2 and every(500, 10) == 500


def test_loss_scaler() -> None:
    off = LossScaler()
    assert off.scale == 1.0 and not off.update(False) and off.state() == {}
    scaler = LossScaler(enabled=True)
    assert scaler.update(False) and scaler.scale == 32768
    for _ in range(GROWTH_INTERVAL):
        assert not scaler.update(True)
    assert scaler.scale == 65536
    scaler.update(True)
    other = LossScaler(enabled=True)
    other.load_state(scaler.state())
    assert (other.scale, other.good_steps) == (65536, 1)
    scaler.scale = 1.0
    assert not scaler.update(False)  # nothing left to lower: the gradient itself is not finite
