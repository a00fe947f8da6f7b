"""Records, names, the bar's lines, the picture, and what is read from curves."""

from __future__ import annotations

import json
import math
import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from lumen.core.errors import ConfigError
from lumen.monitor.config import MonitorConfig
from lumen.monitor.memory import memory_metrics, peak_process_bytes, process_bytes, readable_bytes
from lumen.monitor.names import METRICS, check_names
from lumen.monitor.plot import plot_loss, smooth
from lumen.monitor.progress import ProgressBar, describe
from lumen.monitor.reading import noise, read_curves
from lumen.monitor.records import Records, read_records
from lumen.monitor.report import Reporter, reporters


def test_names_are_prometheus_names_once() -> None:
    assert len({m.key for m in METRICS}) == len({m.prometheus for m in METRICS}) == len(METRICS)
    for metric in METRICS:
        assert metric.prometheus.startswith("lumen_") and metric.text
        assert metric.prometheus.endswith("_total") == (metric.kind == "counter"), metric
        if "bytes" in metric.key or "seconds" in metric.key:
            assert metric.prometheus.removesuffix("_total").endswith(("_bytes", "_seconds"))
    with pytest.raises(AssertionError, match="train/lozz"):
        check_names({"step": 1, "train/lozz": 1.0})


def test_records_are_flushed_and_a_resume_drops_what_comes_after(tmp_path: Path) -> None:
    records = Records(tmp_path)
    for step in (1, 2, 3):
        records.write({"step": step, "train/loss": 1.0 / step})
    assert [r["step"] for r in read_records(tmp_path / "metrics.jsonl")] == [1, 2, 3]  # without closing
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "tr')
    resumed = Records(tmp_path, resume_step=2)
    resumed.write({"step": 3, "train/loss": float("nan")})
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [r["step"] for r in lines] == [1, 2, 3] and lines[-1]["train/loss"] == "nan"
    assert all(r["time"] > 1.6e9 for r in lines)
    Records(tmp_path).close()
    assert (tmp_path / "metrics.jsonl").read_text() == ""


def test_memory_figures() -> None:
    assert 10e6 < process_bytes() <= peak_process_bytes() * 1.05
    assert readable_bytes(3.26e9) == "3.3 GB" and readable_bytes(12) == "12 B"
    assert set(memory_metrics(torch.device("cpu"))) == {"memory/process_bytes", "memory/process_peak_bytes"}


def train_record(step: int, loss: float) -> dict[str, Any]:
    return {
        "step": step, "train/loss": loss, "train/grad_norm": 0.5, "train/learning_rate": 1e-4,
        "train/tokens_per_second": 480.0, "memory/process_bytes": 3_300_000_000,
    }  # fmt: skip


def test_lines_of_the_log(capsys: pytest.CaptureFixture[str]) -> None:
    line = describe(train_record(3, 1.25), 10)
    assert line == "step 3/10  loss 1.2500  grad norm 0.500  lr 1.00e-04  480 tokens/s  3.3 GB"
    held = {"step": 4, "eval/loss": 1.0, "eval/perplexity": math.e, "eval/accuracy": 0.5}
    assert "held-out loss 1.0000  perplexity 2.72  token accuracy 50.0%" in describe(held, 10)
    assert describe({"step": 1, "event": "x"}, 10) == ""
    with ProgressBar(10, enabled=False) as bar:
        bar.record(train_record(3, 1.25))
    assert "loss 1.2500" in capsys.readouterr().err
    with ProgressBar(10, start=2, enabled=True) as shown:
        shown.step(5, loss=1.5, tokens_per_second=1234.0)
        shown.record(train_record(5, 1.25))
    said = capsys.readouterr().err
    assert "5/10" in said and "loss 1.5000" in said and "1,234 tokens/s" in said and "1.2500" not in said


def test_reporters(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert reporters(["none"]) == [] and reporters(["tensorboard"]) == ["tensorboard"]
    assert reporters(["wandb"]) == [] and "wandb is not built" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="unknown reporter 'tensorbord'"):
        reporters(["tensorbord"])


def test_tensorboard_gets_every_metric(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    reporter = Reporter(MonitorConfig(report_to=["tensorboard"]), tmp_path)
    reporter.write(train_record(3, 1.25))
    reporter.close()
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "runs"))
    events.Reload()
    (scalar,) = events.Scalars("train/loss")
    assert (scalar.step, scalar.value) == (3, 1.25)


def test_tensorboard_is_imported_only_when_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    Reporter(MonitorConfig(), tmp_path).close()
    with pytest.raises(ConfigError, match="needs the tensorboard package"):
        Reporter(MonitorConfig(report_to=["tensorboard"]), tmp_path)


# -- curves -----------------------------------------------------------------------------------------------------------


def falling(n: int, start: float, end: float, *, scatter: float = 0.05, shape: float = 3.0, seed: int = 0) -> list:
    """Exponential fall from start towards end; `shape` e-foldings over the run."""
    draw = random.Random(seed)
    scale = 1 - math.exp(-shape)
    return [
        (10 * i, start - (start - end) * (1 - math.exp(-shape * i / n)) / scale + draw.gauss(0, scatter))
        for i in range(1, n + 1)
    ]


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("n", [30, 200])
def test_readings_of_synthetic_curves(seed: int, n: int) -> None:
    steady = falling(n, 2.5, 1.2, shape=0.5, seed=seed)
    assert read_curves(steady).verdict == "still falling"
    assert read_curves(falling(n, 2.5, 1.2, shape=12.0, seed=seed)).verdict == "flat"
    level = falling(n, 1.5, 1.5, seed=seed)
    assert read_curves(level).verdict == "not learning"
    rising = falling(n // 2, 2.5, 1.5, seed=seed) + [(s + 5 * n, v) for s, v in falling(n // 2, 1.5, 3.0, seed=seed)]
    assert read_curves(rising).verdict == "unstable"
    held = [(n * k, 2.0 - 0.5 * min(k, 4) + 0.12 * max(0, k - 4)) for k in range(1, 11)]
    overfit = read_curves(falling(n, 2.5, 0.4, shape=2.0, seed=seed), held)
    assert overfit.verdict == "overfitting" and f"step {4 * n}" in " ".join(overfit.lines + overfit.advice)
    still = [(n * k, 2.5 - 0.1 * k) for k in range(1, 11)]
    assert read_curves(falling(n, 2.5, 1.4, shape=1.0, seed=seed), still).verdict == "still falling"


def test_readings_that_need_no_curve() -> None:
    few = read_curves([(1, 2.0), (2, 1.0)])
    assert few.verdict == "too few steps to say" and few.advice
    assert read_curves([]).verdict == "too few steps to say"
    broken = [*falling(20, 2.0, 1.0), (999, float("nan"))]
    assert read_curves(broken, skipped=5).verdict == "unstable"
    spiky = [(s, v + (2.0 if s % 70 == 0 else 0.0)) for s, v in falling(100, 2.0, 1.0, scatter=0.01)]
    assert read_curves(spiky).verdict == "unstable" and "jump" in read_curves(spiky).lines[0]


def test_a_reading_says_the_numbers() -> None:
    reading = read_curves(falling(50, 2.0, 1.0, scatter=0.0), [(10, 1.9), (500, 1.1)])
    assert "training loss 1.939 → 1.000, held-out loss 1.900 → 1.100" in reading.lines[0] and reading.advice


def test_noise_of_a_trend_is_its_scatter() -> None:
    assert noise([v for _, v in falling(2000, 3.0, 1.0, scatter=0.1)]) == pytest.approx(0.1, rel=0.1)
    assert noise([1.0]) == 0.0


def test_smoothing_keeps_a_constant_and_does_not_lag() -> None:
    assert smooth([2.0, 2.0, 2.0], 0.9) == pytest.approx([2.0, 2.0, 2.0])
    assert smooth([4.0, 0.0], 0.0) == [4.0, 0.0]
    line = [float(i) for i in range(50)]
    assert smooth(line, 0.8)[25] == pytest.approx(25.0, abs=0.05)  # no lag behind a trend


def test_the_picture(tmp_path: Path) -> None:
    records: list[dict[str, Any]] = [train_record(s, v) for s, v in falling(60, 2.5, 1.2)]
    records += [{"step": s, "eval/loss": 1.4 + 10 / s} for s in (100, 300, 600)]
    path = tmp_path / "plots" / "loss.png"
    assert plot_loss(records, path, title="run", subtitle="sub")
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" and path.stat().st_size > 20_000
    assert not plot_loss([{"step": 1, "event": "x"}], tmp_path / "none.png")
    assert plot_loss([train_record(1, 2.0)], tmp_path / "one.png")
