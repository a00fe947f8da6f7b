"""The thermal guard on sensor traces: it slows, pauses and resumes, and the run is the undisturbed one, bit for bit."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file
from tests.helpers import run_config
from tests.helpers.recorded import open_machine

from lumen.hardware import probe
from lumen.monitor.config import MonitorSection
from lumen.monitor.records import read_records
from lumen.monitor.thermal import BLIND, BackgroundSensor, ThermalGuard, guard_for, sensor_of
from lumen.trainer import loop as trainer_loop
from lumen.trainer.train import run_training


class Clock:
    """Time that only sleeping moves."""

    def __init__(self) -> None:
        self.now, self.slept = 0.0, []

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.slept.append(seconds)


def guard(trace: list[float | None], **options: Any) -> tuple[ThermalGuard, Clock]:
    """A guard whose sensor gives these values, the last for ever; limits 85, 95 and 5."""
    values: Iterator[float | None] = iter(trace)
    clock = Clock()
    last: list[float | None] = [None]

    def sensor() -> float | None:
        last[0] = next(values, last[0])
        return last[0]

    return ThermalGuard(sensor, 85, 95, 5, 1.0, clock=clock, sleep=clock.sleep, **options), clock


def steps(one: ThermalGuard, count: int, saved: list[int] | None = None) -> list[tuple[str, float]]:
    """(state, duty) after each of `count` steps of two seconds."""
    found = []
    for number in range(count):
        one.after_step(2.0, lambda number=number: (saved if saved is not None else []).append(number), lambda: False)
        found.append((one.state, round(one.duty, 3)))
    return found


def test_below_the_maximum_nothing_happens() -> None:
    one, clock = guard([40, 84.9, 85])
    assert steps(one, 3) == [("cool", 1.0)] * 3 and clock.slept == [] and one.events == []


def test_above_it_the_duty_cycle_falls_with_the_temperature_and_hysteresis_holds() -> None:
    one, clock = guard([86, 90, 94.9, 84, 80.1, 79.9, 84])
    assert steps(one, 7) == [
        ("slowed", 0.925), ("slowed", 0.625), ("slowed", 0.257), ("slowed", 0.925), ("slowed", 0.925),
        ("cool", 1.0), ("cool", 1.0),
    ]  # fmt: skip
    at_work, rested = 5 * 2.0, clock.now
    expected = 2.0 * sum(1 / duty - 1 for duty in (0.925, 0.625, 0.2575, 0.925, 0.925))
    assert rested == pytest.approx(expected, rel=1e-3) and one.rested == pytest.approx(rested)
    assert 0.5 < at_work / (at_work + rested) < 0.7


def test_at_the_critical_limit_it_saves_pauses_and_resumes_when_cool() -> None:
    one, clock = guard([70, 96, 97, 92, 86, 81, 79, 60])
    saved: list[int] = []
    assert [state for state, _ in steps(one, 3, saved)] == ["cool", "cool", "cool"]
    assert saved == [1], "one checkpoint, before the pause"
    assert one.pauses == 1 and one.paused == clock.now == 5.0, "five readings until it was below 80"


def test_a_signal_ends_a_pause_and_a_rest() -> None:
    one, clock = guard([96])
    asked = iter([False, False, True])
    one.after_step(2.0, lambda: None, lambda: next(asked, True))
    assert one.state == "paused" and clock.now <= 1.0
    two, clock = guard([94])
    two.after_step(100.0, lambda: None, lambda: True)
    assert clock.slept == []


def test_a_sensor_that_dies_neither_starts_nor_holds_a_pause() -> None:
    one, clock = guard([None])
    assert steps(one, 2) == [("cool", 1.0)] * 2
    dead, clock = guard([96, None])
    dead.after_step(2.0, lambda: None, lambda: False)
    assert dead.state == "slowed" and clock.now >= BLIND and any("told nothing" in event for event in dead.events)


def trained(folder: Path, name: str, monkeypatch: pytest.MonkeyPatch, one: ThermalGuard | None) -> tuple[Path, Any]:
    out = folder / name
    monkeypatch.setattr(trainer_loop, "guard_for", lambda section, gpu: one)
    result = run_training(run_config(folder, output_dir=str(out), save_strategy="no"), resolved="# x\n")
    return out, result


def losses(out: Path) -> list[tuple[float, float]]:
    records = read_records(out / "metrics.jsonl")
    return [(record["train/loss"], record["train/grad_norm"]) for record in records if "train/loss" in record]


def test_a_hot_card_slows_pauses_and_resumes_bit_equal_to_an_undisturbed_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With dropout and accumulation; 10 steps, of which one is followed by a pause with a checkpoint."""
    calm, _ = trained(tmp_path, "calm", monkeypatch, None)
    one, clock = guard([60, 88, 92, 96, 90, 79, 86, 60])
    hot, result = trained(tmp_path, "hot", monkeypatch, one)
    assert one.pauses == 1 and one.rested > 0 and clock.slept
    assert losses(hot) == losses(calm) and len(losses(hot)) == 10
    a, b = (load_file(out / "adapter_model.safetensors") for out in (calm, hot))
    assert all(torch.equal(a[name], b[name]) for name in a)
    records = read_records(hot / "metrics.jsonl")
    events = [record["event"] for record in records if "event" in record]
    assert [word for event in events for word in ("slows", "pausing", "full speed") if word in event] == [
        "slows", "pausing", "full speed", "slows", "full speed",
    ]  # fmt: skip
    last = [record for record in records if "thermal/pauses_total" in record][-1]
    assert last["thermal/pauses_total"] == 1 and last["thermal/paused_seconds_total"] == 2.0
    assert (hot / "checkpoint-4").is_dir() and not (calm / "checkpoint-4").exists()
    assert result.steps == 10


def test_the_configuration_decides() -> None:
    assert guard_for(MonitorSection(), None) is None, "off on the CPU unless asked for"
    one = guard_for(MonitorSection(max_temperature_c=70), None, sensor=lambda: 20.0)
    assert one is not None and (one.maximum, one.critical) == (70, 80)
    assert guard_for(MonitorSection(max_temperature_c=0), None, sensor=lambda: 99.0) is None
    with pytest.raises(ValidationError, match="critical_temperature_c must be above"):
        MonitorSection(max_temperature_c=90, critical_temperature_c=88)


def test_the_sensor_is_the_edge_of_the_card_that_trains(tmp_path: Path) -> None:
    view = open_machine("rx7900xtx", tmp_path).view
    gpu = probe(view).gpus[0]
    assert sensor_of(gpu, lambda: view)() == 39.0, "amd-smi tells edge 39, hotspot 47, memory 52"
    folder = view.path(f"/sys/bus/pci/devices/{gpu.pci}/hwmon/hwmon3")
    folder.mkdir(parents=True)
    for number, (label, degrees) in enumerate((("edge", 66), ("junction", 81), ("mem", 92)), start=1):
        (folder / f"temp{number}_label").write_text(f"{label}\n")
        (folder / f"temp{number}_input").write_text(f"{degrees}000\n")
    assert sensor_of(gpu, lambda: view)() == 66.0
    assert sensor_of(None, lambda: view)() is None


def test_reading_costs_no_step_time() -> None:
    """A tool that takes 50 ms answers from a thread: 200 looks take less than 1 % of 200 steps of 50 ms."""

    def slow() -> float:
        time.sleep(0.05)
        return 40.0

    sensor = BackgroundSensor(slow, 0.05)
    try:
        assert sensor() == 40.0
        one = ThermalGuard(sensor, 85, 95)
        started = time.thread_time()
        for _ in range(200):
            one.after_step(0.05, lambda: None, lambda: False)
        assert time.thread_time() - started < 0.01 * 200 * 0.05
    finally:
        sensor.close()
