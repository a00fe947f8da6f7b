"""kill -9 at random moments, in the middle of saves too, loses nothing that was committed."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from tests.helpers import run_values

from lumen.checkpoint import Store
from lumen.monitor.records import read_records

STEPS = 60

LAUNCHER = """
import os, sys
import lumen.trainer.train, lumen.cli.main, peft, transformers  # once, for all the runs that are started
for line in sys.stdin:
    child = os.fork()
    if child == 0:
        code = lumen.cli.main.run(["train", line.strip()])
        sys.stderr.flush()
        os._exit(code)
    print(child, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
"""Starts a `lumen train` in a process of its own for every line it reads; says its pid, and at the end its status."""


class Launcher:
    """Runs of one configuration, one after the other."""

    def __init__(self, folder: Path) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(["src", "."])}
        self.folder = folder
        self.process = subprocess.Popen(
            [sys.executable, "-c", LAUNCHER],
            cwd=Path(__file__).parents[2],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=(folder / "log").open("a"),
            text=True,
        )

    def start(self) -> int:
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(f"{self.folder / 'run.yaml'}\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline())

    def wait(self) -> int:
        assert self.process.stdout
        return int(self.process.stdout.readline())

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text()


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Launcher]:
    launcher = Launcher(tmp_path)
    yield launcher
    launcher.process.kill()
    launcher.process.wait()


def prepare(folder: Path) -> Path:
    values = run_values(folder, save_steps=1, save_total_limit=2, max_steps=STEPS, num_train_epochs=1)
    (folder / "run.yaml").write_text(yaml.safe_dump(values))
    return folder / "out"


def newest(out: Path) -> int:
    return max(Store(out).steps(), default=0)


@pytest.mark.parametrize("kills", [5, pytest.param(20, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])])
def test_kill_9_at_random_moments_loses_nothing_committed(tmp_path: Path, launcher: Launcher, kills: int) -> None:
    """Checkpoints are written at every step, so most moments lie inside a save or right beside one.

    A directory of its final name is committed.  After each kill the newest one that was seen before, or a newer one,
    is whole; in the end the metrics have every step once, and losses and weights are those of a run without kills.
    """
    draw = random.Random(kills)
    out = prepare(tmp_path)
    store = Store(out)
    seen = 0
    inside = 0
    for number in range(kills):
        child = launcher.start()
        target = seen + draw.randint(1, max(1, (STEPS - 5 - seen) // (kills - number)))
        while newest(out) < target:
            time.sleep(0.001)
        time.sleep(draw.random() * 0.15)
        seen = newest(out)
        os.kill(child, signal.SIGKILL)
        assert launcher.wait() == -signal.SIGKILL, launcher.log[-2000:]
        inside += any(".tmp-" in entry.name or ".old-" in entry.name for entry in out.iterdir())
        latest = store.latest()
        assert latest is not None and int(latest.name.partition("-")[2]) >= seen, launcher.log[-2000:]
        assert store.problem(latest) is None
    launcher.start()
    assert launcher.wait() == 0, launcher.log[-2000:]
    assert launcher.log.count("resuming") == kills
    assert not [e.name for e in out.iterdir() if ".tmp-" in e.name or ".old-" in e.name]
    assert [r["step"] for r in read_records(out / "metrics.jsonl")] == list(range(1, STEPS + 1))
    whole = tmp_path / "whole"
    values = yaml.safe_load((tmp_path / "run.yaml").read_text()) | {"output_dir": str(whole), "save_strategy": "no"}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(values))
    launcher.start()
    assert launcher.wait() == 0
    losses = [[r["train/loss"] for r in read_records(d / "metrics.jsonl")] for d in (out, whole)]
    assert losses[0] == losses[1]
    assert (out / "adapter_model.safetensors").read_bytes() == (whole / "adapter_model.safetensors").read_bytes()
    if kills == 20:
        assert inside >= 3, "the moments were not inside saves"


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_signals_save_and_leave(tmp_path: Path, launcher: Launcher, signum: int, code: int) -> None:
    out = prepare(tmp_path)
    values = yaml.safe_load((tmp_path / "run.yaml").read_text()) | {"save_steps": 500}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(values))
    child = launcher.start()
    while not read_records(out / "metrics.jsonl"):
        time.sleep(0.01)
    os.kill(child, signum)
    assert launcher.wait() == code, launcher.log[-2000:]
    assert f"{signal.Signals(signum).name} received" in launcher.log
    assert "everything is saved in" in launcher.log and "Traceback" not in launcher.log
    latest = Store(out).latest()
    assert latest is not None
    step = json.loads((latest / "trainer_state.json").read_text())["step"]
    assert step == max(r["step"] for r in read_records(out / "metrics.jsonl")) < STEPS
