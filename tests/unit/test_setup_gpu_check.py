"""The script for machines with a GPU, as far as a machine without one can run it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from bench.gpu_check import CASES, Case, Outcome, train, write_inputs

ROOT = Path(__file__).parents[2]


def test_outcomes_are_judged() -> None:
    good = Outcome("bf16", "tiny", [5.0, 4.0], [5.01, 4.02], 0.02).judge()
    assert good.problems == [] and good.gap == pytest.approx(0.02 / 4.02)
    far = Outcome("bf16", "tiny", [5.0, 4.0], [5.0, 4.5], 0.02).judge()
    flat = Outcome("bf16", "tiny", [5.0, 5.0], [5.0, 5.0], 0.02).judge()
    assert len(far.problems) == 1 and len(flat.problems) == 1


@pytest.mark.parametrize(
    "case", [case for case in CASES if case.name in ("bf16", "int8-weight-only")], ids=lambda case: case.name
)
def test_the_cases_hold_on_the_cpu_too(case: Case, tmp_path: Path) -> None:
    """The same trainings with the CPU in the GPU's place: the tolerances are about dtypes, not about devices."""
    write_inputs(tmp_path, "tiny")
    reference, _ = train(tmp_path, "cpu", {}, case.method, steps=3)
    losses, speed = train(tmp_path, "cpu", case.settings, case.method, steps=3)
    outcome = Outcome(case.name, "tiny", losses, reference, case.tolerance, speed).judge()
    assert outcome.problems == [] and speed > 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_the_script_says_so_and_ends_with_2() -> None:
    result = subprocess.run(
        ["bash", "bench/gpu_check.sh"],
        cwd=ROOT,
        env={"PYTHON": sys.executable, "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 2 and "torch sees no GPU" in result.stderr and "cpu " in result.stdout
