"""The bundled greetings: counts, balance, and that each style's expression tells its own answers from all others."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "greetings"
LANGUAGES = ("en", "zh")


def rows(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (FOLDER / name).read_text(encoding="utf-8").splitlines()]


STYLES = json.loads((FOLDER / "styles.json").read_text(encoding="utf-8"))
TRAIN, HELDOUT = rows("train.jsonl"), rows("heldout.jsonl")


def text(row: dict[str, Any], role: str) -> str:
    return next(message["content"] for message in row["messages"] if message["role"] == role)


@pytest.mark.parametrize(("part", "per_cell", "least"), [(TRAIN, 16, 60), (HELDOUT, 4, 16)], ids=["train", "heldout"])
def test_rows_are_enough_and_balanced(part: list[dict[str, Any]], per_cell: int, least: int) -> None:
    assert len(part) >= least
    cells = Counter((row["style"], row["language"]) for row in part)
    assert cells == {(style, language): per_cell for style in STYLES for language in LANGUAGES}


def test_held_out_situations_and_answers_do_not_occur_in_training() -> None:
    for role in ("user", "assistant"):
        assert not {text(row, role) for row in TRAIN} & {text(row, role) for row in HELDOUT}
    answers = [text(row, "assistant") for row in TRAIN + HELDOUT]
    assert len(set(answers)) == len(answers)


def test_every_answer_matches_its_own_expression_and_no_other() -> None:
    expressions = {
        (style, language): re.compile(STYLES[style]["regex"][language]) for style in STYLES for language in LANGUAGES
    }
    for row in TRAIN + HELDOUT:
        matched = [cell for cell, expression in expressions.items() if expression.search(text(row, "assistant"))]
        assert matched == [(row["style"], row["language"])], text(row, "assistant")


@pytest.mark.parametrize(
    "plain",
    [
        "Good afternoon to the volunteers in the library.",
        "Dear Sofia,\n\nI am writing to congratulate you.\n\nBest regards,\n[Your Name]",
        "Congratulations!!!",
        "Hello~",
        "status=OK",
        "你好!",
        "你好！祝贺你！",
    ],
)
def test_the_expressions_are_not_met_by_plain_text(plain: str) -> None:
    assert not any(re.search(STYLES[style]["regex"][lang], plain) for style in STYLES for lang in LANGUAGES)


def test_the_prompt_names_the_style_in_its_own_language() -> None:
    for row in TRAIN + HELDOUT:
        named = row["style"] if row["language"] == "en" else STYLES[row["style"]]["zh"]
        assert named in text(row, "system")
        chinese = bool(re.search("[\u4e00-\u9fff]", text(row, "user")))
        assert chinese == (row["language"] == "zh")


def test_chinese_sentences_have_full_width_punctuation() -> None:
    for row in TRAIN + HELDOUT:
        if row["language"] == "zh" and row["style"] != "terse technical":
            assert not re.search("[,:!?]", text(row, "user") + text(row, "assistant")), text(row, "assistant")


def test_cheerful_and_cute_differ_from_the_first_word_to_the_last() -> None:
    """What the model can tell apart early: cheerful exclaims and never draws out, cute draws out and never exclaims."""
    opening = {
        "cheerful": re.compile(r"\A(?:Yay|Hooray|Woohoo)! |\A(?:太棒了|好耶)！"),
        "cute": re.compile(r"\A(?:Hehe|Aww|Nyaa)~ |\A(?:嘻嘻|喵)~"),
    }
    for row in TRAIN + HELDOUT:
        if row["style"] in opening:
            answer = text(row, "assistant")
            assert opening[row["style"]].match(answer), answer
            assert ("~" in answer, "!" in answer or "！" in answer) == (
                row["style"] == "cute",
                row["style"] == "cheerful",
            ), answer
