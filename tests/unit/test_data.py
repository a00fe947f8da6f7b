"""From rows to batches: what is learned, what is padded, and in which order."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.helpers import tiny_tokenizer

from lumen.data.batch import collate
from lumen.data.build import build_datasets
from lumen.data.config import DataConfig
from lumen.data.examples import IGNORE, Example, ExampleStore
from lumen.data.loader import Loader


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LUMEN_CACHE", str(tmp_path / "cache"))


def write(tmp_path: Path, rows: list[Any], name: str = "rows.json") -> str:
    path = tmp_path / name
    text = "\n".join(json.dumps(row) for row in rows) if name.endswith("l") else json.dumps(rows, indent=1)
    path.write_text(text, "utf-8")
    return str(path)


def learned(example: Example, tokenizer: Any) -> str:
    return str(tokenizer.decode(example.input_ids[example.labels != IGNORE]))


ALPACA = [{"instruction": "Say hi", "input": "to Bob", "output": "Hi Bob", "history": [["A?", "B."]]}]
SHAREGPT = [{"conversations": [{"from": "human", "value": "A?"}, {"from": "gpt", "value": "B."}], "system": "Be kind"}]
OPENAI = [{"messages": [{"role": "user", "content": "A?"}, {"role": "assistant", "content": "B."}]}]


@pytest.mark.parametrize(
    ("rows", "text", "trained"),
    [
        (ALPACA, "user\nSay hi\nto Bob<|im_end|>", "B.<|im_end|>Hi Bob<|im_end|>"),
        (SHAREGPT, "<|im_start|>system\nBe kind<|im_end|>\n<|im_start|>user\nA?", "B.<|im_end|>"),
        (OPENAI, "<|im_start|>user\nA?<|im_end|>\n<|im_start|>assistant\nB.<|im_end|>", "B.<|im_end|>"),
    ],
)
@pytest.mark.parametrize("name", ["rows.json", "rows.jsonl"])
def test_formats_learn_the_assistants_turns_only(
    tmp_path: Path, rows: list[Any], text: str, trained: str, name: str
) -> None:
    tokenizer = tiny_tokenizer()
    data = build_datasets(DataConfig(dataset=write(tmp_path, rows, name)), tokenizer, seed=0)
    (example,) = data.train
    assert text in tokenizer.decode(example.input_ids)
    assert learned(example, tokenizer) == trained
    assert data.report.datasets[0].rows == data.report.datasets[0].kept == 1


def test_batch_labels_come_from_masks_not_from_ids() -> None:
    rows = [[Example(np.array([7, 2, 2]), np.array([IGNORE, 2, 2]))], [Example(np.array([5]), np.array([5]))]]
    batch = collate(rows, pad_token_id=2, pad_to_multiple_of=4)
    assert batch.input_ids.tolist() == [[7, 2, 2, 2], [5, 2, 2, 2]]
    assert batch.labels.tolist() == [[IGNORE, 2, 2, IGNORE], [IGNORE] * 4]
    assert batch.segment_ids.tolist() == [[1, 1, 1, 0], [1, 0, 0, 0]]
    assert (batch.num_tokens, batch.num_loss_tokens, batch.packed) == (4, 2, False)


def test_loader_goes_on_where_it_was() -> None:
    store = ExampleStore.from_examples([Example(np.array([9, n]), np.array([IGNORE, n])) for n in range(7)])
    loader = Loader(store, 2, seed=3)
    seen = [loader.next_batch().input_ids[:, 1].tolist() for _ in range(5)]
    state = loader.state()
    assert state == {"seed": 3, "epoch": 1, "position": 1}
    ahead = [loader.next_batch().input_ids[:, 1].tolist() for _ in range(9)]
    other = Loader(store, 2, seed=0)
    other.load_state(state)
    assert [other.next_batch().input_ids[:, 1].tolist() for _ in range(9)] == ahead
    assert sorted(n for batch in seen[:4] for n in batch) == list(range(7))
