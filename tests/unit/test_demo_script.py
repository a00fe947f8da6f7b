"""The parts of `make demo` that need no model: scoring of styles, the curve as text, the configuration it trains."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def demo() -> ModuleType:
    spec = importlib.util.spec_from_file_location("lumen_demo", ROOT / "scripts" / "demo.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["lumen_demo"] = module
    spec.loader.exec_module(module)
    return module


def test_the_datas_own_answers_match_every_style_and_nothing_else_does(demo: ModuleType) -> None:
    styles = demo.Styles()
    gold = [row["messages"][-1]["content"] for row in styles.rows]
    score = styles.score(gold)
    assert score == dict.fromkeys(styles.table, (8, 8)) and demo.matched(score) == 4
    assert demo.matched(styles.score(["Hello!"] * len(gold))) == 0
    swapped = gold[1:] + gold[:1]  # each answer at the next row's style
    assert demo.matched(styles.score(swapped)) == 0


def test_a_style_needs_seventy_percent(demo: ModuleType) -> None:
    assert demo.matched({"a": (6, 8), "b": (5, 8), "c": (7, 10), "d": (0, 8)}) == 2


def test_each_style_is_shown_in_both_languages(demo: ModuleType) -> None:
    styles = demo.Styles()
    shown = [(styles.rows[n]["style"], styles.rows[n]["language"]) for n in styles.shown()]
    assert shown == [(style, language) for style in styles.table for language in ("en", "zh")]


def test_sparkline(demo: ModuleType) -> None:
    assert demo.sparkline([3.0, 2.0, 1.0]) == "█▅▁"
    assert demo.sparkline([1.0, 1.0]) == "▁▁" and demo.sparkline([]) == ""
    assert len(demo.sparkline(range(1000), width=60)) == 60


def test_an_answer_is_shortened(demo: ModuleType) -> None:
    assert demo.short("  a\n\n\nb ") == "a\nb"
    assert demo.short("x" * 200, 10) == "x" * 9 + "…"


def test_the_configuration_is_valid_and_says_int8() -> None:
    from lumen.config import load

    loaded = load(ROOT / "examples" / "greetings" / "demo.yaml")
    assert loaded.run.quant.recipe == "int8" and loaded.run.eval_on_start
    assert loaded.notes == []


def test_a_training_that_fails_is_the_demos_failure(
    demo: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "answers", lambda *_, **__: ["?"] * 32)
    monkeypatch.setattr(demo, "model_is_there", lambda _: True)
    monkeypatch.setattr(demo, "train", lambda *_: 2)
    assert demo.main(["--run", str(tmp_path)]) == 1


def test_a_loss_that_does_not_fall_is_the_demos_failure(
    demo: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    styles = demo.Styles()
    monkeypatch.setattr(demo, "answers", lambda *_, **__: [row["messages"][-1]["content"] for row in styles.rows])
    monkeypatch.setattr(demo, "model_is_there", lambda _: True)

    def train(run: Path, words: object) -> int:
        from tests.unit.test_compare import write_run

        write_run(run)
        if fell:
            return 0
        metrics = run / "metrics.jsonl"
        metrics.write_text(metrics.read_text().replace('"eval/loss": 3.0', '"eval/loss": 1.6'))
        return 0

    monkeypatch.setattr(demo, "train", train)
    fell = True
    assert demo.main(["--run", str(tmp_path / "good")]) == 0
    fell = False
    assert demo.main(["--run", str(tmp_path / "bad")]) == 1


@pytest.mark.parametrize(("styles_learned", "status"), [(4, 0), (3, 0), (2, 1)])
def test_fewer_than_three_styles_are_the_demos_failure(
    demo: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    styles_learned: int,
    status: int,
) -> None:
    styles = demo.Styles()
    learned = list(styles.table)[:styles_learned]

    def answers(adapter: Path | None, progress: object) -> list[str]:
        gold = [row["messages"][-1]["content"] if row["style"] in learned else "Hello!" for row in styles.rows]
        return gold if adapter else ["Hello!"] * len(gold)

    def train(run: Path, words: object) -> int:
        from tests.unit.test_compare import write_run

        write_run(run)
        return 0

    monkeypatch.setattr(demo, "answers", answers)
    monkeypatch.setattr(demo, "model_is_there", lambda _: True)
    monkeypatch.setattr(demo, "train", train)
    assert demo.main(["--run", str(tmp_path / "run")]) == status
    printed = capsys.readouterr().out
    assert f"styles matched: 0 of 4 before, {styles_learned} of 4 after" in printed and "total time: " in printed
    assert ("FAILED: 2 styles matched after training" in printed) == bool(status)


def test_the_lines_of_what_to_type_next_fit_a_hundred_columns(
    demo: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "executable", str(ROOT / ".venv" / "bin" / "python"))
    demo.show_end(demo.Demo(), demo.RUN)
    lines = capsys.readouterr().out.split("next, from the checkout:\n")[1].splitlines()
    assert len(lines) == 4 and all(".venv/bin/lumen" in line and len(line) <= 100 for line in lines)
