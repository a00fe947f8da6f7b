"""A resumed run is the run that was never interrupted, bit for bit; what is damaged or different is said."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.helpers import run_config, run_values, write_rows

from lumen.checkpoint import Store
from lumen.core.errors import CheckpointError, ConfigError
from lumen.monitor.records import read_records
from lumen.trainer.run import RunResult
from lumen.trainer.train import run_training

NOT_COMPARED = ("time", "train/tokens_per_second", "train/step_seconds", "eval/seconds")


def train(folder: Path, **overrides: Any) -> RunResult:
    return run_training(run_config(folder, **overrides), resolved="# resolved\n")


def curve(directory: Path) -> list[dict[str, Any]]:
    """The metrics of a run without what depends on the clock or the machine's memory."""
    return [
        {k: v for k, v in record.items() if k not in NOT_COMPARED and not k.startswith("memory/")}
        for record in read_records(directory / "metrics.jsonl")
    ]


def assert_same_weights(one: Path, two: Path) -> None:
    a, b = load_file(one), load_file(two)
    assert a.keys() == b.keys() and a
    for name in a:
        assert torch.equal(a[name], b[name]), name


def continue_from(folder: Path, step: int, name: str, **overrides: Any) -> Path:
    """Copy checkpoint `step` and the metrics so far into a new output_dir and resume there."""
    out = folder / name
    out.mkdir()
    shutil.copytree(folder / "out" / f"checkpoint-{step}", out / f"checkpoint-{step}")
    shutil.copy(folder / "out" / "metrics.jsonl", out / "metrics.jsonl")
    train(folder, output_dir=str(out), **overrides)
    return out


KINDS: dict[str, dict[str, Any]] = {
    "lora fp32": {},
    "lora bf16": {"bf16": True},
    "lora fp16": {"fp16": True},
    "lora checkpointed": {"disable_gradient_checkpointing": False, "gradient_checkpointing": True},
    "lora int8": {"bf16": True, "quant": {"recipe": "int8"}},
    "lora mxfp4": {"bf16": True, "quant": {"recipe": "mxfp4"}},
    "full mxfp4": {"finetuning_type": "full", "bf16": True, "learning_rate": 1e-3, "quant": {"recipe": "mxfp4"}},
    "lora fp8-delayed": {"bf16": True, "quant": {"recipe": "fp8-delayed"}},
    "full fp8-delayed": {"finetuning_type": "full", "learning_rate": 1e-3, "quant": {"recipe": "fp8-delayed"}},
    "lora int8-smooth": {"bf16": True, "quant": {"recipe": "int8-smooth"}},
    "packed": {"packing": True, "cutoff_len": 96, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 3},
    "full bf16": {"finetuning_type": "full", "bf16": True, "learning_rate": 1e-3},
    "full pure_bf16": {"finetuning_type": "full", "pure_bf16": True, "learning_rate": 1e-3},
    "freeze": {"finetuning_type": "freeze", "freeze_trainable_layers": 1},
    "head trained": {"additional_target": ["lm_head"], "bf16": True},
    "dora": {"use_dora": True},
    "pissa": {"pissa_init": True, "pissa_iter": -1},
}


@pytest.mark.parametrize("kind", KINDS)
def test_resume_is_bit_equal_in_mid_epoch(tmp_path: Path, kind: str) -> None:
    """Dropout 0.1, accumulation 4, resumed in mid-epoch: losses, gradient norms, evaluations and weights."""
    options = {
        "save_steps": 1,
        "val_size": 4,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "logging_steps": 2,
        **KINDS[kind],
    }
    whole = train(tmp_path, **options)
    weights = "model.safetensors" if options.get("finetuning_type", "lora") != "lora" else "adapter_model.safetensors"
    last = f"checkpoint-{whole.steps}"
    assert whole.steps >= 6
    for step in (3, whole.steps - 1) if kind == "lora fp32" else (3,):
        out = continue_from(tmp_path, step, f"from-{step}", **options)
        assert curve(out) == curve(tmp_path / "out")
        assert_same_weights(out / weights, tmp_path / "out" / weights)
        for name in ("trainable.safetensors", "optimizer.safetensors", "rng.safetensors"):
            if load_file(out / last / name) or name != "trainable.safetensors":
                assert_same_weights(out / last / name, tmp_path / "out" / last / name)


def test_the_learning_curve_is_not_the_same_without_the_state(tmp_path: Path) -> None:
    """The test above can fail: dropping the optimizer's state changes the losses."""
    train(tmp_path, save_steps=1)
    out = tmp_path / "other"
    out.mkdir()
    shutil.copytree(tmp_path / "out" / "checkpoint-3", out / "checkpoint-3")
    shutil.copy(tmp_path / "out" / "metrics.jsonl", out / "metrics.jsonl")
    from safetensors.torch import save_file

    state = load_file(out / "checkpoint-3" / "optimizer.safetensors")
    save_file({k: torch.zeros_like(v) for k, v in state.items()}, out / "checkpoint-3" / "optimizer.safetensors")
    (out / "checkpoint-3" / "manifest.json").write_text('{"step": 3, "files": {}}')
    train(tmp_path, output_dir=str(out), save_steps=1)
    assert curve(out) != curve(tmp_path / "out") and curve(out)[:3] == curve(tmp_path / "out")[:3]


def test_an_output_dir_with_a_checkpoint_resumes_by_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(tmp_path, max_steps=4)
    capsys.readouterr()
    train(tmp_path, max_steps=6)
    said = capsys.readouterr().err
    assert "at step 4 of 6" in said and "max_steps: 6 (the checkpoint was trained with 4)" in said
    steps = [r["step"] for r in read_records(tmp_path / "out" / "metrics.jsonl")]
    assert steps == [1, 2, 3, 4, 5, 6]


def test_metrics_past_the_checkpoint_are_cut_and_a_torn_line_too(tmp_path: Path) -> None:
    train(tmp_path, save_steps=3, max_steps=5)
    shutil.rmtree(tmp_path / "out" / "checkpoint-5")
    with (tmp_path / "out" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "train/lo')
    train(tmp_path, save_steps=3, max_steps=5)
    lines = (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3, 4, 5]


def test_a_damaged_newest_checkpoint_falls_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(tmp_path, save_steps=2, max_steps=4)
    path = tmp_path / "out" / "checkpoint-4" / "optimizer.safetensors"
    path.write_bytes(path.read_bytes()[:-7])
    capsys.readouterr()
    train(tmp_path, save_steps=2, max_steps=6)
    said = capsys.readouterr().err
    assert "checkpoint-4 is damaged" in said and "checkpoint-2 at step 2" in said.replace("\n", "")
    assert [r["step"] for r in read_records(tmp_path / "out" / "metrics.jsonl")] == [1, 2, 3, 4, 5, 6]
    assert Store(tmp_path / "out").problem(tmp_path / "out" / "checkpoint-4") is None


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"per_device_train_batch_size": 1}, "per_device_train_batch_size was 2, is 1"),
        ({"gradient_accumulation_steps": 2}, "gradient_accumulation_steps was 4, is 2"),
        ({"seed": 8}, "seed was 7, is 8"),
        ({"cutoff_len": 30}, "cutoff_len was 2048, is 30"),
        ({"lora_rank": 4}, "in the checkpoint and"),
        ({"lora_target": ["q_proj"]}, "trains other parameters"),
        ({"finetuning_type": "full"}, "trains other parameters"),
    ],
)
def test_what_would_make_the_position_wrong_is_refused_by_name(
    tmp_path: Path, change: dict[str, Any], named: str
) -> None:
    train(tmp_path, max_steps=2)
    with pytest.raises(CheckpointError, match=named):
        train(tmp_path, max_steps=4, **change)


def test_another_data_file_is_refused(tmp_path: Path) -> None:
    train(tmp_path, max_steps=2)
    write_rows(tmp_path / "rows.jsonl", 38, start=1)
    with pytest.raises(CheckpointError, match="training data is not the same"):
        train(tmp_path, max_steps=4)


def test_another_number_of_processes_is_refused(tmp_path: Path) -> None:
    train(tmp_path, max_steps=2)
    path = tmp_path / "out" / "checkpoint-2"
    state = json.loads((path / "trainer_state.json").read_text())
    state["positions"]["world_size"] = 4
    (path / "trainer_state.json").write_text(json.dumps(state))
    (path / "manifest.json").write_text('{"step": 2, "files": {}}')
    with pytest.raises(CheckpointError, match="world_size was 4, is 1"):
        train(tmp_path, max_steps=4)


def test_another_learning_rate_is_printed_and_accepted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(tmp_path, max_steps=2)
    train(tmp_path, max_steps=4, learning_rate=5e-3)
    assert "learning_rate: 0.005 (the checkpoint was trained with 0.01)" in capsys.readouterr().err
    records = read_records(tmp_path / "out" / "metrics.jsonl")
    assert records[2]["train/learning_rate"] <= 5e-3


def test_overwriting_and_switching_off(tmp_path: Path) -> None:
    train(tmp_path, max_steps=4, save_steps=2)
    with pytest.raises(ConfigError, match="holds checkpoints of an earlier run"):
        train(tmp_path, max_steps=2, resume_from_checkpoint=False)
    assert Store(tmp_path / "out").steps() == [2, 4]
    train(tmp_path, max_steps=3, save_steps=3, overwrite_output_dir=True, seed=9)
    assert Store(tmp_path / "out").steps() == [3]
    assert [r["step"] for r in read_records(tmp_path / "out" / "metrics.jsonl")] == [1, 2, 3]


def test_a_named_checkpoint(tmp_path: Path) -> None:
    train(tmp_path, max_steps=4, save_steps=2)
    train(
        tmp_path, max_steps=4, output_dir=str(tmp_path / "b"), resume_from_checkpoint=str(tmp_path / "out/checkpoint-2")
    )
    assert [r["step"] for r in read_records(tmp_path / "b" / "metrics.jsonl")] == [3, 4]
    with pytest.raises(CheckpointError, match="there is no checkpoint"):
        train(tmp_path, resume_from_checkpoint=str(tmp_path / "nowhere"))
    with pytest.raises(CheckpointError, match="no whole checkpoint"):
        train(tmp_path, output_dir=str(tmp_path / "c"), resume_from_checkpoint=True)
    (tmp_path / "out/checkpoint-2/rng.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match="is damaged"):
        train(tmp_path, resume_from_checkpoint=str(tmp_path / "out/checkpoint-2"))


def test_save_only_model_cannot_be_resumed(tmp_path: Path) -> None:
    train(tmp_path, max_steps=2, save_only_model=True)
    assert not (tmp_path / "out/checkpoint-2/optimizer.safetensors").exists()
    assert (tmp_path / "out/checkpoint-2/adapter_model.safetensors").exists()
    with pytest.raises(CheckpointError, match="no training state"):
        train(tmp_path, max_steps=4)


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_signals_save_and_leave_and_the_run_goes_on_bit_equal(
    tmp_path: Path, signum: int, code: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The signal comes inside the second micro-batch of step 4: that step is dropped whole and made again."""
    whole = train(tmp_path)
    from lumen.trainer import loop

    calls = 0
    real = loop.objective("sft")

    def counting(model: Any, batch: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 14:
            os.kill(os.getpid(), signum)
        return real(model, batch)

    monkeypatch.setattr(loop, "objective", lambda stage: counting)
    out = tmp_path / "stopped"
    stopped = train(tmp_path, output_dir=str(out))
    assert stopped.exit_code == code and stopped.steps == 3
    assert stopped.last_checkpoint == out / "checkpoint-3" and calls == 14
    said = capfd.readouterr().err
    assert signal.Signals(signum).name in said and "run the same command again" in said
    monkeypatch.undo()
    resumed = train(tmp_path, output_dir=str(out))
    assert resumed.exit_code == 0 and resumed.steps == whole.steps
    assert curve(out) == curve(tmp_path / "out")
    assert_same_weights(out / "adapter_model.safetensors", tmp_path / "out" / "adapter_model.safetensors")


def test_a_finished_run_started_again_only_finishes(tmp_path: Path) -> None:
    first = train(tmp_path, max_steps=2)
    again = train(tmp_path, max_steps=2)
    assert again.steps == first.steps and again.metrics["train_loss"] == first.metrics["train_loss"]


def test_run_values_are_valid(tmp_path: Path) -> None:
    assert set(run_values(tmp_path)) <= set(type(run_config(tmp_path)).model_fields)
