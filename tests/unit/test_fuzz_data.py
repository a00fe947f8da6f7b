"""200 damaged data files: each is a clear error or a right run, never another exception and never a silent drop.

The files are made from seeds, so a failure names the number that repeats it.  The count of rows is checked against an
oracle that shares nothing with our reader: Python's json module, or lines counted by hand.
"""

from __future__ import annotations

import csv
import io
import json
import random
from pathlib import Path
from typing import Any

import pytest
from tests.helpers import tiny_tokenizer

from lumen.core import LumenError
from lumen.data.build import Datasets, build_datasets
from lumen.data.config import DataConfig

FILES = 200


def alpaca(n: int) -> dict[str, Any]:
    return {"instruction": f"Add {n} and {n}", "input": "" if n % 2 else "now", "output": f"{2 * n} 好", "history": []}


def sharegpt(n: int) -> dict[str, Any]:
    turns = [{"from": "human", "value": f"Q{n}"}, {"from": "gpt", "value": f"A{n}"}]
    if n % 3 == 0:
        turns += [
            {"from": "human", "value": "weather?"},
            {"from": "function_call", "value": json.dumps({"name": "weather", "arguments": {"city": "Oslo"}})},
            {"from": "observation", "value": "rain"},
            {"from": "gpt", "value": "It rains."},
        ]
    tools = json.dumps([{"name": "weather", "description": "d", "parameters": {}}]) if n % 3 == 0 else ""
    return {"conversations": turns, "system": "Be kind" if n % 2 else "", "tools": tools}


def openai(n: int) -> dict[str, Any]:
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    messages: list[dict[str, Any]] = [{"role": "user", "content": f"Q{n}"}]
    if n % 3 == 0:
        messages += [
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "2", "tool_call_id": "c"},
        ]
    messages.append({"role": "assistant", "content": f"A{n}", "weight": 1})
    return {"messages": messages}


ODD: list[Any] = [
    None, "", " ", 0, -1, 1e308, True, [], {}, [None], [[]], {"a": {"b": []}}, ["x", 1], "\u2028", "\x00", "<|im_end|>",
    "\ud800", "x" * 3000, "[{", '{"name": 1}', [["q", "a"], ["q"]], {"role": "user"}, 10**400,
]  # fmt: skip
KEYS = ["role", "from", "value", "content", "output", "tool_calls", "weight", "name", "", "历史"]


def damage_value(value: Any, rng: random.Random, depth: int = 0) -> Any:
    """Change one place of a JSON value: another type, a missing or a new key, another order."""
    if isinstance(value, dict) and value and rng.random() < 0.8:
        key = rng.choice(list(value))
        act = rng.randrange(5)
        if act == 0:
            return {k: v for k, v in value.items() if k != key}
        if act == 1:
            return {**value, rng.choice(KEYS): rng.choice(ODD)}
        if act == 2:
            return {(rng.choice(KEYS) if k == key else k): v for k, v in value.items()}
        return {**value, key: damage_value(value[key], rng, depth + 1)}
    if isinstance(value, list) and value and rng.random() < 0.8:
        value = list(value)
        n = rng.randrange(len(value))
        act = rng.randrange(5)
        if act == 0:
            rng.shuffle(value)
        elif act == 1:
            del value[n]
        elif act == 2:
            value.insert(n, value[n])
        elif act == 3:
            value.insert(n, rng.choice(ODD))
        else:
            value[n] = damage_value(value[n], rng, depth + 1)
        return value
    return rng.choice(ODD)


def damage_bytes(data: bytes, rng: random.Random) -> bytes:
    a, b = sorted((rng.randrange(len(data) + 1), rng.randrange(len(data) + 1)))
    act = rng.randrange(9)
    if act == 0:
        return data[:a]
    if act == 1:
        return data[:a] + data[a + 1 :]
    if act == 2:
        return data[:a] + bytes([rng.randrange(256)]) + data[a + 1 :]
    if act == 3:
        return data[:a] + bytes(rng.choices(b'{}[]",:\\\n 0eN\xff\xc0', k=rng.randrange(1, 6))) + data[a:]
    if act == 4:
        return data[:a] + data[b:]
    if act == 5:
        return data[:b] + data[a:]
    if act == 6:
        return b"\xef\xbb\xbf" + data
    if act == 7:
        return data.decode("utf-8").encode(rng.choice(["gb18030", "utf-16", "utf-16-le"]))
    return rng.choice(
        [b"", b"\n\n", b"[]", b"{}", b"null", b"[" * 5000, b"\x00" * 9, b"[NaN]", data.replace(b"\n", b"\r\n")]
    )


def make(seed: int, folder: Path) -> tuple[Path, DataConfig]:
    rng = random.Random(seed)
    form = rng.choice([alpaca, sharegpt, openai])
    rows: list[Any] = [form(n) for n in range(rng.randrange(1, 9))]
    for _ in range(rng.choice([0, 1, 1, 2, 4])):
        n = rng.randrange(len(rows))
        rows[n] = damage_value(rows[n], rng)
    kind = rng.choice(["json", "json", "jsonl", "jsonl", "csv", "txt"])
    if kind == "json":
        data = json.dumps(rows, ensure_ascii=rng.random() < 0.5, indent=rng.choice([None, 1])).encode(
            "utf-8", "replace"
        )
    elif kind == "jsonl":
        data = "\n".join(json.dumps(row) for row in rows).encode()
    elif kind == "csv":
        buffer = io.StringIO()
        writer = csv.writer(buffer)
        writer.writerow(["instruction", "input", "output"])
        for n, row in enumerate(rows):
            writer.writerow([f"say {n}", rng.choice(["", "a,b", 'q"q', "two\nlines"]), json.dumps(row)[:40]])
        data = buffer.getvalue().encode()
    else:
        data = "\n".join(f"document {n} 好 " * rng.randrange(1, 40) for n in range(len(rows))).encode()
    for _ in range(rng.choice([0, 0, 1, 1, 2])):
        try:
            data = damage_bytes(data, rng)
        except UnicodeDecodeError:
            break
    path = folder / f"rows{seed}.{kind}"
    path.write_bytes(data)
    config = DataConfig(
        dataset=str(path),
        on_bad_rows=rng.choice(["raise", "skip"]),
        cutoff_len=rng.choice([2, 16, 64, 512, 512, 512, 512]),
        mask_history=rng.random() < 0.3,
        packing=rng.random() < 0.3,
        enable_thinking=rng.choice([True, False, None]),
        encoding=rng.choice(["utf-8"] * 16 + ["gb18030", "utf-16"]),
        val_size=rng.choice([0, 0, 0, 0.3]),
    )
    return path, config


def oracle(path: Path, encoding: str) -> int | None:
    """Rows of a file as others would count them; None where that is not certain."""
    try:
        text = path.read_bytes().decode("utf-8-sig" if encoding == "utf-8" else encoding)
    except UnicodeDecodeError:
        return None
    if path.suffix == ".csv":
        return None
    if path.suffix == ".json":
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            return None
        return len(value) if isinstance(value, list) else None
    if text.lstrip().startswith("[") and path.suffix == ".jsonl":
        return None
    return sum(bool(line.strip()) for line in text.split("\n"))


def build(path: Path, config: DataConfig) -> Datasets | None:
    try:
        return build_datasets(config, tiny_tokenizer(), seed=0, stage="pt" if path.suffix == ".txt" else "sft")
    except LumenError as error:
        assert error.what.strip(), "an error says what is wrong"
        assert error.where, f"an error says where: {error}"
        return None


@pytest.mark.parametrize("block", range(10))
def test_damaged_files_are_clear_errors_or_right_runs(
    block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LUMEN_CACHE", str(tmp_path / "cache"))
    ran = 0
    for seed in range(block * FILES // 10, (block + 1) * FILES // 10):
        path, config = make(seed, tmp_path)
        try:
            data = build(path, config)
        except Exception as error:
            raise AssertionError(f"file {seed} ({path.name}): {type(error).__name__}: {error}") from error
        if data is None:
            continue
        ran += 1
        (report,) = data.report.datasets
        assert report.rows == report.kept + len(report.dropped) + len(report.rejected), f"file {seed}"
        assert (count := oracle(path, config.encoding)) is None or report.rows == count, f"file {seed}: {count} rows"
        assert config.on_bad_rows == "skip" or not report.rejected, f"file {seed}"
        assert report.kept > 0
        assert report.examples == len(data.train) + sum(map(len, data.eval.values())), f"file {seed}"
        for example in data.train:
            assert 0 < len(example.input_ids) <= config.cutoff_len, f"file {seed}"
            assert (example.labels != -100).any(), f"file {seed}"
            assert example.labels[0] == -100, f"file {seed}"
    assert ran >= 3, "the fuzzer damages files so much that nothing runs"
