"""`lumen bench`: dispatch, what it prints, and the status it leaves with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lumen.bench import BENCHES
from lumen.bench.numerics import command as numerics
from lumen.bench.numerics import equality, figures, gemms
from lumen.bench.numerics.equality import Comparison
from lumen.bench.numerics.figures import Figure
from lumen.cli.main import run


def test_every_bench_is_listed_explained_and_dispatched(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "--help"]) == 0
    shown = capsys.readouterr().out
    for name, line in BENCHES.items():
        assert f"  {name} " in shown and line in shown
        with pytest.raises(SystemExit) as done:
            run(["bench", name, "--help"])
        assert done.value.code == 0 and f"lumen bench {name}" in capsys.readouterr().out
    assert run(["bench"]) == 2 and run(["bench", "numerisc"]) == 2
    assert "did you mean `numerics`" in capsys.readouterr().err


@pytest.mark.parametrize(("got", "status"), [(1.02, 0), (1.2, 1), (float("nan"), 1)])
def test_numerics_fails_where_a_figure_is_missed(
    got: float, status: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(figures, "figures", lambda rows: [Figure("table", "line", 1.0, 0.05, lambda: got, unit="dB")])
    monkeypatch.setattr(equality, "comparisons", list)
    monkeypatch.setattr(gemms, "ready", list)
    assert numerics.main(["--quick", "--json", str(tmp_path / "out.json")]) == status
    shown = capsys.readouterr().out
    assert ("MISSED" in shown and "1 missed" in shown) == bool(status)
    (line,) = json.loads((tmp_path / "out.json").read_text())
    assert line["ok"] is not bool(status) and line["name"] == "line"


def test_numerics_says_what_differs_and_what_is_not_installed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [Comparison("torch", "same", lambda: (0, 9)), Comparison("no_such_package", "codes", lambda: (0, 0))]
    monkeypatch.setattr(figures, "figures", lambda rows: [])
    monkeypatch.setattr(equality, "comparisons", lambda: lines)
    monkeypatch.setattr(gemms, "ready", list)
    assert numerics.main([]) == 0
    shown = capsys.readouterr().out
    assert "1 hold, 0 missed, 1 not run" in shown and "pip install --no-deps no_such_package" in shown
    lines[0] = Comparison("torch", "other", lambda: (1, 9))
    assert numerics.main([]) == 1 and "1 of 9" in capsys.readouterr().out
