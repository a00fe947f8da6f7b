"""The rows every tool trains on, and the rows it is scored on; made once, with one tokenizer.

Setting a: every row is exactly 512 tokens: real instructions, with real answers run together and cut so that the
rendered conversation has that length.  Setting b: the file's own rows, those that fit 512 tokens (longer ones would be
truncated by each tool in its own way).  Every row carries the model's default system message in a column of its own,
so that all tools render the same tokens whatever their template's default is.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
LENGTH = 512


def messages(row: dict[str, str]) -> list[dict[str, str]]:
    """The conversation of an alpaca row, as LLaMA-Factory and Lumen make it."""
    prompt = row["instruction"] + ("\n" + row["input"] if row["input"] else "")
    turns = [{"role": "user", "content": prompt}, {"role": "assistant", "content": row["output"]}]
    return [{"role": "system", "content": row["system"]}, *turns] if "system" in row else turns


def encode(tokenizer: Any, row: dict[str, str]) -> tuple[list[int], list[int]]:
    """Token ids of the rendered row, and labels: the answer with its end mark, -100 elsewhere."""
    turns = messages(row)
    text = tokenizer.apply_chat_template(turns, tokenize=False)
    head = tokenizer.apply_chat_template(turns[:-1], tokenize=False, add_generation_prompt=True)
    assert text.startswith(head)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    start = len(tokenizer(head, add_special_tokens=False)["input_ids"])
    labels = [-100] * start + ids[start:-1] + [-100]  # the line break after the end mark is not the model's to say
    return ids, labels


def _exactly(tokenizer: Any, instruction: str, answers: list[str], length: int) -> dict[str, str] | None:
    answer = "\n\n".join(answers)
    base = {"instruction": instruction, "input": "", "system": SYSTEM}
    pieces = tokenizer(answer, add_special_tokens=False)["input_ids"]
    spare = length - len(encode(tokenizer, {**base, "output": ""})[0])
    for cut in range(min(spare + 3, len(pieces)), max(0, spare - 8), -1):
        row = {**base, "output": tokenizer.decode(pieces[:cut]).strip()}
        if len(encode(tokenizer, row)[0]) == length:
            return row
    return None


def make(tokenizer: Any, source: Path, folder: Path, *, num_fixed: int, num_natural: int, num_held_out: int) -> dict:
    """Write a.json, b.json, held_out.json and dataset_info.json into `folder`; returns their sizes in tokens."""
    rows = [{"system": SYSTEM, **row} for row in json.loads(source.read_text(encoding="utf-8"))]
    rows = [{k: row[k] for k in ("instruction", "input", "output", "system")} for row in rows]
    natural = [row for row in rows if len(encode(tokenizer, row)[0]) <= LENGTH]
    held_out = natural[-num_held_out:]
    natural = natural[:-num_held_out]
    fixed: list[dict[str, str]] = []
    at = 0
    while len(fixed) < num_fixed:
        group = natural[at % len(natural) :][:8]
        at += 4
        row = _exactly(tokenizer, group[0]["instruction"], [r["output"] for r in group], LENGTH)
        if row is not None:
            fixed.append(row)
    folder.mkdir(parents=True, exist_ok=True)
    sets = {"a": fixed, "b": natural[:num_natural], "held_out": held_out}
    columns = {"prompt": "instruction", "query": "input", "response": "output", "system": "system"}
    info = {f"peers_{name}": {"file_name": f"{name}.json", "columns": columns} for name in sets}
    (folder / "dataset_info.json").write_text(json.dumps(info, indent=1))
    sizes = {}
    for name, some in sets.items():
        (folder / f"{name}.json").write_text(json.dumps(some, ensure_ascii=False, indent=1), encoding="utf-8")
        encoded = [encode(tokenizer, row) for row in some]
        sizes[name] = {
            "rows": len(some),
            "tokens": sum(len(ids) for ids, _ in encoded),
            "labelled": sum(sum(y != -100 for y in labels) for _, labels in encoded),
            "longest": max(len(ids) for ids, _ in encoded),
        }
    sizes["share_of_rows_that_fit"] = (len(natural) + len(held_out)) / len(rows)
    return sizes
