"""`lumen compare`: runs read from what training wrote, set side by side."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from lumen.cli.main import run as lumen
from lumen.core import LumenError
from lumen.eval.compare import as_json, cautions, differences, duration, markdown, table
from lumen.eval.overlay import overlay
from lumen.eval.runs import read_run


def write_run(
    directory: Path, *, finished: bool = True, parameters: tuple[int, int] = (50, 1000), **config: Any
) -> Path:
    """A run directory as the trainer leaves it, with a loss that falls from 3 to 1."""
    directory.mkdir(parents=True)
    values = {"model_name_or_path": "m", "dataset": ["rows"], "eval_dataset": ["held"],
              "learning_rate": 1e-3,
              "finetuning_type": "lora", "lora_rank": 8,
              "quant": {"recipe": "bf16", "rules": []}, **config}  # fmt: skip
    (directory / "config.yaml").write_text(yaml.safe_dump(values))
    lines: list[dict[str, Any]] = [{"step": 0, "time": 1.0, "eval/loss": 3.0}]
    for step in range(1, 11):
        lines.append({"step": step, "time": 1.0 + step, "epoch": step / 10, "train/loss": 3.0 - 0.2 * step,
                      "train/tokens_per_second": 100.0, "memory/process_peak_bytes": 2_000_000_000})  # fmt: skip
    lines += [{"step": 5, "time": 6.0, "eval/loss": 1.5}, {"step": 10, "time": 12.0, "eval/loss": 1.75}]
    (directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    facts = {"device": "cpu", "dtype": "float32", "data_fingerprint": "f",
             "parameters": {"trainable": parameters[0], "total": parameters[1]}}  # fmt: skip
    (directory / "run.json").write_text(json.dumps(facts))
    if finished:
        results = {"steps": 10, "epoch": 1.0, "train_runtime": 200.4, "tokens_per_second": 123.4, "eval_loss": 1.75,
                   "peak_process_bytes": 3_000_000_000}  # fmt: skip
        (directory / "all_results.json").write_text(json.dumps(results))
    return directory


def test_a_run_is_read_as_the_trainer_wrote_it(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "a"))
    assert (run.method, run.recipe, run.steps, run.finished) == ("LoRA r=8", "bf16", 10, True)
    assert run.trainable_share == 0.05
    assert (run.memory, run.tokens_per_second, run.seconds) == (3_000_000_000, 123.4, 200.4)
    assert (run.first, run.final, run.best, run.best_step) == (3.0, 1.75, 1.5, 5)
    assert run.verdict == "overfitting"


def test_a_run_that_was_stopped_is_read_from_its_metrics_and_said_so(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "a", finished=False))
    assert not run.finished
    assert (run.steps, run.memory, run.tokens_per_second, run.final) == (10, 2_000_000_000, 100.0, 1.75)
    assert any("a did not come to its end" in line for line in cautions([run]))
    assert ["steps", "10 (not ended)"] in table([run])


def test_methods_are_told_apart(tmp_path: Path) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"finetuning_type": "full"}, "full"),
        ({"finetuning_type": "freeze", "freeze_trainable_layers": -3}, "freeze (first 3 layers)"),
        ({"use_dora": True, "lora_rank": 4}, "DoRA r=4"),
        ({"quant": {"recipe": "nf4"}}, "QLoRA r=8"),
    ]
    for number, (config, method) in enumerate(cases):
        assert read_run(write_run(tmp_path / str(number), **config)).method == method


def test_what_was_set_differently_is_listed_and_nothing_else(tmp_path: Path) -> None:
    runs = [
        read_run(write_run(tmp_path / "a", output_dir="a")),
        read_run(write_run(tmp_path / "b", output_dir="b", learning_rate=1e-4, quant={"recipe": "int8", "rules": []})),
    ]
    assert differences(runs) == [["learning_rate", "0.001", "0.0001"], ["quant.recipe", "bf16", "int8"]]
    assert cautions(runs) == []


@pytest.mark.parametrize("change", [{"eval_dataset": ["other"]}, {"cutoff_len": 64}, {"model_name_or_path": "n"}])
def test_losses_of_different_held_out_rows_are_cautioned_against(tmp_path: Path, change: dict[str, Any]) -> None:
    runs = [read_run(write_run(tmp_path / "a")), read_run(write_run(tmp_path / "b", **change))]
    assert any("do not compare" in line for line in cautions(runs))


def test_runs_that_share_a_name_are_told_apart_by_path(tmp_path: Path) -> None:
    runs = [read_run(write_run(tmp_path / "x" / "run")), read_run(write_run(tmp_path / "y" / "run"))]
    assert table(runs)[0][1:] == [str(tmp_path / "x" / "run"), str(tmp_path / "y" / "run")]
    assert [run["path"] for run in as_json(runs)["runs"]] == table(runs)[0][1:]


def test_the_command_prints_json_and_draws_the_curves(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [str(write_run(tmp_path / "a")), str(write_run(tmp_path / "b", finetuning_type="full"))]
    assert lumen(["compare", *paths, "--json", "--plot", str(tmp_path / "c.png")]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [run["method"] for run in found["runs"]] == ["LoRA r=8", "full"]
    assert found["runs"][0]["eval_curve"] == [[0, 3.0], [5, 1.5], [10, 1.75]]
    assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")
    assert lumen(["compare", *paths, "--no-plot"]) == 0
    shown = capsys.readouterr().out
    assert "LoRA r=8" in shown and "1.5000 (step 5)" in shown and "5.00%" in shown
    assert not (tmp_path / "compare.png").exists()


def test_markdown_escapes_the_bar() -> None:
    assert markdown([["a", "b"], ["x|y", "1"]]) == "| a | b |\n| --- | --- |\n| x\\|y | 1 |"


def test_runs_of_very_different_length_are_drawn_on_a_common_scale(tmp_path: Path) -> None:
    runs = [read_run(write_run(tmp_path / "a")), read_run(write_run(tmp_path / "b"))]
    runs[1].steps = 100
    assert overlay(runs, tmp_path / "o.png")
    runs[0].train_curve = runs[0].held_out_curve = runs[1].train_curve = runs[1].held_out_curve = []
    assert not overlay(runs, tmp_path / "none.png")


def test_what_is_no_run_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert lumen(["compare", str(tmp_path / "nowhere")]) == 2
    assert "no run directory" in capsys.readouterr().err
    with pytest.raises(LumenError, match=r"no metrics\.jsonl"):
        read_run(tmp_path)
    damaged = write_run(tmp_path / "a")
    (damaged / "run.json").write_text("{")
    with pytest.raises(LumenError, match=r"run\.json is damaged"):
        read_run(damaged)


@pytest.mark.parametrize(("seconds", "text"), [(48.4, "48 s"), (200.4, "3 min 20 s"), (7500, "2 h 05 min")])
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text
