"""Cutting to cutoff_len: what goes first, what stays."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.helpers import tiny_tokenizer

from lumen.data.build import build_datasets
from lumen.data.config import DataConfig

END = "<|im_end|>"


@pytest.fixture
def cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("LUMEN_CACHE", str(tmp_path / "cache"))

    def run(*turns: str, cutoff_len: int, system: str = "", **config: Any) -> tuple[str, str]:
        """(the whole text, what is learned of it)."""
        names = ("human", "gpt")
        talk = [{"from": names[n % 2], "value": text} for n, text in enumerate(turns)]
        path = tmp_path / "rows.json"
        path.write_text(json.dumps([{"conversations": talk, "system": system}]), "utf-8")
        tokenizer = tiny_tokenizer()
        data = build_datasets(DataConfig(dataset=str(path), cutoff_len=cutoff_len, **config), tokenizer, seed=0)
        (example,) = data.train
        assert len(example.input_ids) <= cutoff_len
        assert data.report.datasets[0].truncated == 1
        learned = example.labels != -100
        return tokenizer.decode(example.input_ids), tokenizer.decode(example.input_ids[learned])

    return run


def test_turns_that_do_not_fit_are_left_out_from_the_end(cut: Any) -> None:
    text, learned = cut("q1", "a1", "q2", "a2", "q3 " + "x" * 80, "a3", cutoff_len=60)
    assert learned == f"a1{END}a2{END}"
    assert text.endswith(f"a2{END}")  # no tokens of a question that nobody answers
    assert "q3" not in text


def test_a_later_answer_that_reaches_over_loses_its_tail_and_its_end(cut: Any) -> None:
    text, learned = cut("q1", "a1", "q2", "b" * 90, cutoff_len=60)
    assert learned.startswith(f"a1{END}b")
    assert learned.endswith("bbb")
    assert text.endswith("bbb")


def test_with_mask_history_the_oldest_turns_go_first_and_the_system_message_stays(cut: Any) -> None:
    turns = [f"{'qa'[n % 2]}{n // 2} {'x' * 20}" for n in range(8)]
    text, learned = cut(*turns, system="SYS", cutoff_len=130, mask_history=True)
    assert learned == turns[-1] + END
    assert text.startswith(f"<|im_start|>system\nSYS{END}\n<|im_start|>user\nq")
    assert turns[0] not in text
    assert turns[-2] in text and turns[-4] in text  # as few as possible are left out
    assert text.endswith(f"<|im_start|>assistant\n{turns[-1]}{END}") or text.endswith(f"{turns[-1]}{END}\n")


def test_question_and_system_message_each_keep_their_share(cut: Any) -> None:
    text, learned = cut("BEGIN " + "u" * 200 + " FINISH", "a", system="SYSTEM", cutoff_len=60)
    assert f"<|im_start|>system\nSYSTEM{END}" in text
    assert "user\nBEGIN" in text and f"FINISH{END}" in text
    assert learned == f"a{END}"
    text, learned = cut("uu", "a", system="BEGIN " + "s" * 200 + " FINISH", cutoff_len=60)
    assert f"user\nuu{END}" in text
    assert "system\nBEGIN" in text and f"FINISH{END}" in text
    assert learned == f"a{END}"


def test_a_long_question_and_a_long_answer_share_the_room(cut: Any) -> None:
    text, learned = cut("q" * 300, "a" * 300, cutoff_len=100)
    question = text.count("q")
    assert abs(question - len(learned)) <= 2
    assert set(learned) == {"a"}


def test_qwen3_examples_of_one_row_are_cut_each_on_its_own(cut: Any) -> None:
    text, learned = cut("q" * 60, "a", cutoff_len=75, **{"template": "qwen3"})
    assert learned == f"<think>\n\n</think>\n\na{END}"
    assert text.startswith("<|im_start|>user\nqq")
