"""The cache: shared by concurrent runs, rebuilt where damaged, harmless where it cannot be written."""

from __future__ import annotations

import json
import multiprocessing
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.helpers import tiny_tokenizer

from lumen.data import cache
from lumen.data.build import Datasets, build_datasets
from lumen.data.config import DataConfig


@pytest.fixture
def rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("LUMEN_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([{"instruction": f"q{n}", "output": "a" * n} for n in range(8)]), "utf-8")
    return str(path)


def build(rows: str, **config: Any) -> Datasets:
    return build_datasets(DataConfig(dataset=rows, **config), tiny_tokenizer(), seed=0)


def test_a_cached_set_is_mapped_and_equal_with_its_report(rows: str) -> None:
    first, again = build(rows), build(rows)
    assert isinstance(again.train.tables[0].ids, np.memmap)
    assert [e.input_ids.tolist() for e in first.train] == [e.input_ids.tolist() for e in again.train]
    assert [e.labels.tolist() for e in first.train] == [e.labels.tolist() for e in again.train]
    assert [e.source for e in first.train] == [e.source for e in again.train]
    assert again.report.datasets[0].cached
    assert again.report.datasets[0].dropped == first.report.datasets[0].dropped  # row 0 has an empty output
    assert len(again.report.dropped) == 1
    assert again.report.lines()[0].endswith("(cached)")


@pytest.mark.parametrize("name", ["ids.npy", "offsets.npy", "meta.json", "report.json", "learned.npy"])
@pytest.mark.parametrize("damage", ["cut", "empty", "gone"])
def test_a_damaged_entry_is_made_again(rows: str, tmp_path: Path, name: str, damage: str) -> None:
    expected = build(rows).train.fingerprint
    (entry,) = (tmp_path / "cache" / "data").iterdir()
    file = entry / name
    if damage == "gone":
        file.unlink()
    else:
        file.write_bytes(b"" if damage == "empty" else file.read_bytes()[:-3])
    again = build(rows)
    assert again.train.fingerprint == expected
    assert not again.report.datasets[0].cached
    assert build(rows).report.datasets[0].cached


def test_tokenized_path_is_the_cache_folder_and_no_promise(rows: str, tmp_path: Path) -> None:
    folder = tmp_path / "tokens"
    build(rows, tokenized_path=str(folder))
    assert len(list(folder.iterdir())) == 1
    changed = build(rows, tokenized_path=str(folder), cutoff_len=20)
    assert not changed.report.datasets[0].cached
    assert len(list(folder.iterdir())) == 2


def test_a_folder_that_cannot_be_written_is_noted_only(rows: str, tmp_path: Path) -> None:
    (tmp_path / "blocked").write_text("a file")
    assert len(build(rows, tokenized_path=str(tmp_path / "blocked")).train) == 7


def _one_run(arguments: tuple[str, int]) -> str:
    rows, _ = arguments
    return build(rows, overwrite_cache=True).train.fingerprint


@pytest.mark.skipif(sys.platform == "win32", reason="fork")
def test_runs_that_write_the_same_entry_at_once_all_succeed(rows: str, tmp_path: Path) -> None:
    with multiprocessing.get_context("fork").Pool(4) as pool:
        prints = pool.map(_one_run, [(rows, n) for n in range(12)])
    assert len(set(prints)) == 1
    assert build(rows).report.datasets[0].cached
    assert [p.name for p in (tmp_path / "cache" / "data").iterdir() if "." in p.name] == []  # nothing left behind


def test_the_key_covers_every_field_that_decides_tokens() -> None:
    """A new DataConfig field must be put into the key or named here as one that decides no token."""
    not_tokens = {
        "dataset", "eval_dataset", "dataset_dir", "template", "mix_strategy", "interleave_probs", "val_size", "packing",
        "neat_packing", "overwrite_cache", "tokenized_path", "group_by_length", "train_sampling_strategy",
        "dataloader_drop_last", "disable_shuffling", "on_bad_rows",
    }  # fmt: skip
    assert set(DataConfig.model_fields) == not_tokens | set(cache.KEYED)
