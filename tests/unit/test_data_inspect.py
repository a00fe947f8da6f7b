"""`lumen data inspect`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.helpers import save_tiny, shared_data

from lumen.cli.main import run
from lumen.data.inspect import histogram


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("LUMEN_CACHE", str(tmp_path / "cache"))
    return str(save_tiny(tmp_path / "model"))


def write(tmp_path: Path, rows: list[Any]) -> str:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps(row) if not isinstance(row, str) else row for row in rows), "utf-8")
    return str(path)


def test_rows_are_shown_with_what_is_learned_in_brackets(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path, [{"instruction": "q", "output": "好 a"}, {"instruction": "q", "output": None}, "{broken"])
    assert run(["data", "inspect", file, "--model", model, "--rows", "2"]) == 1  # there is a bad row
    text = capsys.readouterr().out
    assert "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n⟦好 a<|im_end|>⟧\n" in text
    assert f"dropped: output is null (1): {file}:2" in text
    assert f"rejected: not JSON at column 2: expecting property name enclosed in double quotes (1): {file}:3" in text
    assert "3 rows, 1 kept, 1 dropped, 1 rejected" in text


def test_json_has_the_figures_and_the_rows(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path, [{"instruction": "q" * n, "output": "a"} for n in range(1, 30)])
    config = tmp_path / "run.yaml"
    config.write_text(f"model_name_or_path: {model}\ndataset: {file}\ncutoff_len: 64\n", "utf-8")
    assert run(["data", "inspect", str(config), "--json", "--rows", "1", "max_samples=20"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert (values["examples"], values["report"]["datasets"][0]["rows"]) == (20, 20)
    (row,) = values["rows"]
    assert [piece["learned"] for piece in row["pieces"]] == [False, True, False]
    assert sum(label != -100 for label in row["labels"]) == 2
    assert values["loss_tokens"] == 40
    assert sum(count for _, _, count in values["lengths"]["histogram"]) == 20
    assert 0.5 < values["packing"]["efficiency"] <= 1
    assert 0 <= values["padding"]["share"] < 1


def test_tokens_are_listed_with_ids_and_labels(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path, [{"instruction": "q", "output": "a"}])
    assert run(["data", "inspect", file, "--model", model, "--tokens"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "     0       1    -100  '<|im_start|>'" in lines
    assert any(line.split()[1:3] == ["2", "2"] and "<|im_end|>" in line for line in lines)


def test_mistakes_are_errors_of_the_user(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path, [{"instruction": "q", "output": "a"}])
    for words, message in (
        ([file], "no model is named"), ([str(tmp_path / "gone.json"), "--model", model], "no data file"),
        ([file, "--model", model, "template=chatmll"], "did you mean 'chatml'"),
        ([file, "--model", model, "cutof_len=5"], "cutoff_len"),
        ([str(shared_data("dpo_en_demo.json")), "--model", model], "preference rows"),
    ):  # fmt: skip
        assert run(["data", "inspect", *words]) == 2
        assert message in capsys.readouterr().err


def test_histogram_covers_every_length() -> None:
    for lengths in ([5], [5, 5, 5], [1, 2, 3], list(range(1, 500))):
        bins = histogram(np.array(lengths))
        assert sum(count for _, _, count in bins) == len(lengths)
        assert bins[0][0] == min(lengths)
        assert bins[-1][1] == max(lengths)
