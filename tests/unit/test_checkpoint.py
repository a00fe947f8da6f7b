"""A checkpoint is whole or not there; the last good one is never deleted; what differs at a resume is named."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy
import pytest
import torch
from torch import nn

from lumen.checkpoint import (
    Store,
    TrainState,
    check_resumable,
    read_rng,
    read_state,
    restore_optimizer,
    restore_weights,
    rng_state,
    save_state,
    set_rng_state,
)
from lumen.core.errors import CheckpointError
from lumen.optim import AdamW, parameter_groups


def fill(store: Store, *steps: int) -> None:
    for step in steps:
        with store.write(step) as directory:
            (directory / "weights.bin").write_bytes(bytes([step % 256]) * 100)
            (directory / "sub").mkdir()
            (directory / "sub" / "more.json").write_text("{}")


def test_commit_and_latest(tmp_path: Path) -> None:
    store = Store(tmp_path)
    assert store.latest() is None and store.steps() == []
    fill(store, 5, 20, 100)
    assert store.steps() == [5, 20, 100]
    assert store.latest() == tmp_path / "checkpoint-100"
    manifest = json.loads((tmp_path / "checkpoint-100" / "manifest.json").read_text())
    assert set(manifest["files"]) == {"weights.bin", "sub/more.json"}


def test_a_failed_write_leaves_nothing(tmp_path: Path) -> None:
    store = Store(tmp_path)
    fill(store, 1)
    with pytest.raises(RuntimeError), store.write(2) as directory:
        (directory / "half").write_text("x")
        raise RuntimeError
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint-1"]


def test_writing_a_step_again_replaces_it(tmp_path: Path) -> None:
    store = Store(tmp_path)
    fill(store, 1, 1)
    assert store.problem(store.path(1)) is None and store.steps() == [1]


@pytest.mark.parametrize("damage", ["truncate", "flip", "missing", "no manifest", "bad manifest"])
def test_damaged_newest_falls_back(tmp_path: Path, damage: str, capsys: pytest.CaptureFixture[str]) -> None:
    store = Store(tmp_path)
    fill(store, 1, 2)
    target = store.path(2) / "weights.bin"
    if damage == "truncate":
        target.write_bytes(b"x")
    elif damage == "flip":
        target.write_bytes(b"\xff" * 100)
    elif damage == "missing":
        target.unlink()
    elif damage == "no manifest":
        (store.path(2) / "manifest.json").unlink()
    else:
        (store.path(2) / "manifest.json").write_text('{"files": [')
    assert store.latest() == store.path(1)
    assert "checkpoint-2 is damaged" in capsys.readouterr().err


def test_retention_keeps_newest_and_best(tmp_path: Path) -> None:
    store = Store(tmp_path, limit=2)
    fill(store, 1, 2, 3, 4)
    assert store.prune(best=1) == [2, 3]
    assert store.steps() == [1, 4]
    single = Store(tmp_path / "one", limit=1)
    fill(single, 1, 2, 3)
    single.prune(best=2)
    assert single.steps() == [2, 3]  # the best and the newest, both needed


def test_retention_never_deletes_the_last_good_one(tmp_path: Path) -> None:
    store = Store(tmp_path, limit=1)
    fill(store, 1, 2, 3)
    (store.path(3) / "weights.bin").write_bytes(b"\0" * 100)
    (store.path(2) / "weights.bin").unlink()
    store.prune()
    assert store.latest() == store.path(1)
    for step in (1, 2, 3):
        if store.path(step).exists():
            (store.path(step) / "manifest.json").unlink()
    before = store.steps()
    assert store.prune() == [] and store.steps() == before


def test_sweep_removes_leftovers_and_brings_back_what_was_moved_aside(tmp_path: Path) -> None:
    store = Store(tmp_path)
    fill(store, 1, 2)
    (tmp_path / "checkpoint-3.tmp-99").mkdir()
    store.path(2).rename(tmp_path / "checkpoint-2.old-99")
    (tmp_path / "unrelated.tmp-1").mkdir()
    assert len(store.sweep()) == 2
    assert store.steps() == [1, 2] and (tmp_path / "unrelated.tmp-1").exists()
    assert store.latest() == store.path(2)


def test_random_state_round_trip(tmp_path: Path) -> None:
    random.gauss(0, 1)
    numpy.random.normal()
    state = rng_state()
    first = (torch.rand(3).tolist(), random.random(), random.gauss(0, 1), numpy.random.normal(size=3).tolist())
    set_rng_state(state)
    assert first == (torch.rand(3).tolist(), random.random(), random.gauss(0, 1), numpy.random.normal(size=3).tolist())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_round_trip(tmp_path: Path, dtype: torch.dtype) -> None:
    def build() -> tuple[nn.Module, AdamW]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)).to(dtype)
        model[0].requires_grad_(False)
        return model, AdamW(parameter_groups(model, lr=0.1, weight_decay=0.0), lr=0.1)

    def step(model: nn.Module, optimizer: AdamW, scale: float) -> None:
        for parameter in model[1].parameters():  # type: ignore[index]
            parameter.grad = torch.full_like(parameter, scale)
        optimizer.step()

    model, optimizer = build()
    step(model, optimizer, 0.3)
    store = Store(tmp_path)
    state = TrainState(step=1, loader={"seed": 1, "epoch": 0, "position": 4}, optimizer_steps=1, best_metric=2.5)
    with store.write(1) as directory:
        save_state(directory, state, model, optimizer)
    step(model, optimizer, -0.7)

    other, other_optimizer = build()
    latest = store.latest()
    assert latest is not None
    loaded = read_state(latest)
    assert loaded == state
    restore_weights(latest, other)
    restore_optimizer(latest, other_optimizer, loaded)
    step(other, other_optimizer, -0.7)
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
    assert set(read_rng(latest)) >= {"torch_cpu", "python", "numpy"}
    names = {p.suffix for p in latest.iterdir()}
    assert names == {".json", ".safetensors"}


def test_other_trainable_parameters_are_refused(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = AdamW(parameter_groups(model, lr=0.1, weight_decay=0.0), lr=0.1)
    store = Store(tmp_path)
    with store.write(1) as directory:
        save_state(directory, TrainState(), model, optimizer)
    model[0].requires_grad_(False)
    with pytest.raises(CheckpointError, match="trains other parameters"):
        restore_weights(store.path(1), model)


def test_a_model_only_checkpoint_cannot_be_resumed(tmp_path: Path) -> None:
    store = Store(tmp_path)
    fill(store, 1)
    with pytest.raises(CheckpointError, match="no training state"):
        read_state(store.path(1))


def resume(**changes: object) -> list[str]:
    base: dict = {
        "directory": "checkpoint-4", "old_config": {"learning_rate": 1e-4, "save_steps": 5},
        "new_config": {"learning_rate": 1e-4, "save_steps": 5}, "old_positions": {"seed": 1, "world_size": 1},
        "new_positions": {"seed": 1, "world_size": 1}, "old_data": "a", "new_data": "a", "old_versions": {},
    }  # fmt: skip
    from lumen.checkpoint import versions

    base["old_versions"] = versions()
    return check_resumable(**{**base, **changes})


def test_what_differs_is_printed_or_refused() -> None:
    assert resume() == []
    assert resume(new_config={"learning_rate": 1e-4, "save_steps": 50}) == []
    (line,) = resume(new_config={"learning_rate": 3e-4, "save_steps": 5})
    assert "learning_rate: 0.0003" in line and "0.0001" in line
    with pytest.raises(CheckpointError, match="world_size was 1, is 4"):
        resume(new_positions={"seed": 1, "world_size": 4})
    with pytest.raises(CheckpointError, match="contents of the training data changed"):
        resume(new_data="b")
