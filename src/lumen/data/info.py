"""Which files a dataset is and how its rows are read: dataset_info.json, or a file named directly.

`dataset` names an entry of dataset_info.json in `dataset_dir` (LLaMA-Factory's schema, so their folders work as they
are), or is the path of a file, whose row format is then told from its first row.
"""

from __future__ import annotations

import difflib
import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lumen.core import DataError
from lumen.data.json_rows import parse_json
from lumen.data.readers import SUFFIXES

FORMATS = ("alpaca", "sharegpt", "openai", "text")

ALPACA_COLUMNS = {"prompt": "instruction", "query": "input", "response": "output", "history": "history",
                  "system": "system", "tools": "tools"}  # fmt: skip
SHAREGPT_COLUMNS = {"messages": "conversations", "system": "system", "tools": "tools"}
OPENAI_COLUMNS = {"messages": "messages", "system": "system", "tools": "tools"}
SHAREGPT_TAGS = {
    "role_tag": "from", "content_tag": "value", "user_tag": "human", "assistant_tag": "gpt",
    "observation_tag": "observation", "function_tag": "function_call", "system_tag": "system",
}  # fmt: skip
OPENAI_TAGS = {
    "role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant",
    "observation_tag": "tool", "function_tag": "function_call", "system_tag": "system",
}  # fmt: skip

_KEYS = {"hf_hub_url", "ms_hub_url", "om_hub_url", "script_url", "cloud_file_name", "file_name", "formatting",
         "ranking", "subset", "split", "folder", "num_samples", "columns", "tags"}  # fmt: skip
_COLUMNS = {"prompt", "query", "response", "history", "messages", "system", "tools", "images", "videos", "audios",
            "chosen", "rejected", "kto_tag"}  # fmt: skip


@dataclass
class DatasetSpec:
    """One dataset.

    name:        as the user wrote it.
    files:       its files in order; empty for a hub dataset.
    formatting:  alpaca, sharegpt, openai, text, or "" where the first row is to tell.
    columns:     our name of a column → the file's; a column that is not listed is not there.
    tags:        names of roles and of the keys in a message.
    ranking:     rows with two answers, for preference training.
    num_samples: examples of an epoch: the first rows, or all and again as many as are missing; None: all.
    """

    name: str
    files: list[Path] = field(default_factory=list)
    formatting: str = ""
    columns: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    ranking: bool = False
    num_samples: int | None = None
    hub: str = ""
    subset: str | None = None
    split: str = "train"
    folder: str | None = None

    def told_by(self, row: Any) -> DatasetSpec:
        """This spec with the format that `row` has, where none was given."""
        if self.formatting:
            return self
        return replace(self, **detect(row))


def detect(row: Any) -> dict[str, Any]:
    """Format, columns and tags of a row of an undeclared file.  Raises DataError with what would be understood."""
    if not isinstance(row, dict):
        raise DataError(f"expected an object, got {kind(row)}")
    keys = set(row)
    for column in ("messages", "conversations", "conversation"):
        if column in keys:
            turns = row[column] if isinstance(row[column], list) else []
            first = next((turn for turn in turns if isinstance(turn, dict)), {})
            openai = "role" in first or (column == "messages" and "from" not in first)
            tags = OPENAI_TAGS if openai else SHAREGPT_TAGS
            columns = {**SHAREGPT_COLUMNS, "messages": column}
            return {
                "formatting": "openai" if openai else "sharegpt",
                "columns": _with_others(columns, keys),
                "tags": dict(tags),
                "ranking": "chosen" in keys and "rejected" in keys,
            }
    columns = {}
    for prompt, response in (("instruction", "output"), ("prompt", "completion"), ("prompt", "response"),
                             ("instruction", "response"), ("question", "answer"), ("query", "response"),
                             ("prompt", "chosen"), ("instruction", "chosen")):  # fmt: skip
        if prompt in keys and response in keys:
            columns = {**ALPACA_COLUMNS, "prompt": prompt, "response": response}
            break
    else:
        if "instruction" in keys or "output" in keys:
            columns = dict(ALPACA_COLUMNS)
    if columns:
        ranking = "chosen" in keys and "rejected" in keys
        return {"formatting": "alpaca", "columns": _with_others(columns, keys), "ranking": ranking}
    if "text" in keys:
        return {"formatting": "text", "columns": {"prompt": "text"}}
    raise DataError(
        f"the row format is not recognised: columns {', '.join(map(repr, sorted(map(str, keys))[:12])) or '(none)'}",
        fix="use instruction/input/output, conversations, messages or text; or map your columns in dataset_info.json",
    )


def _with_others(columns: dict[str, str], keys: set[str]) -> dict[str, str]:
    others = ("chosen", "rejected", "kto_tag", "images", "videos", "audios")
    return {**columns, **{name: name for name in others if name in keys}}


def kind(value: Any) -> str:
    """What a JSON value is, in words."""
    names = {bool: "true or false", int: "a number", float: "a number", str: "text", list: "a list", dict: "an object"}
    return "null" if value is None else names.get(type(value), type(value).__name__)


def find_datasets(names: list[str], dataset_dir: str) -> list[DatasetSpec]:
    """The specs of `dataset`'s entries.  Raises DataError with the nearest name where one is unknown."""
    directory = Path(dataset_dir)
    info: dict[str, Any] | None = None
    specs = []
    for name in names:
        if info is None:
            info = _read_info(directory)
        if name in info:
            specs.append(_from_info(name, info[name], directory))
            continue
        path = Path(name).expanduser()
        if not path.exists() and (directory / name).exists():
            path = directory / name
        if path.exists():
            specs.append(DatasetSpec(name=name, files=_files(path, name)))
            continue
        if path.suffix.lower() in SUFFIXES or "/" in name:
            raise DataError(f"there is no data file {name}", where="dataset", fix="check the path")
        raise _unknown(name, info, directory)
    return specs


def _unknown(name: str, info: dict[str, Any], directory: Path) -> DataError:
    file = directory / "dataset_info.json"
    if not info:
        fix = f"write {file} with an entry {name!r}, or name a data file such as rows.jsonl"
        return DataError(f"dataset {name!r} is not a file, and there is no {file}", where="dataset", fix=fix)
    near = difflib.get_close_matches(name, info, 1)
    known = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(list(info)[:20])}"
    return DataError(f"dataset {name!r} is not in {file} and is not a file", where="dataset", fix=known)


def _files(path: Path, name: str) -> list[Path]:
    if path.is_file():
        return [path]
    files = sorted(p for p in path.iterdir() if p.suffix.lower() in SUFFIXES and not p.name.startswith("."))
    files = [p for p in files if p.name != "dataset_info.json"]
    if not files:
        raise DataError(f"folder {path} holds no data file", where=name, fix="one of " + ", ".join(SUFFIXES))
    return files


def _read_info(directory: Path) -> dict[str, Any]:
    path = directory / "dataset_info.json"
    if not path.is_file():
        return {}
    try:
        info = parse_json(path.read_bytes().decode("utf-8-sig"))
    except ValueError as error:  # UnicodeDecodeError is one
        raise DataError(f"dataset_info.json cannot be read: {error}", where=str(path)) from None
    if not isinstance(info, dict):
        raise DataError(f"expected an object of datasets, got {kind(info)}", where=str(path))
    return info


def _from_info(name: str, entry: Any, directory: Path) -> DatasetSpec:
    where = f"{directory / 'dataset_info.json'}, entry {name!r}"
    if not isinstance(entry, dict):
        raise DataError(f"expected an object, got {kind(entry)}", where=where)
    _known(entry, _KEYS, where)
    columns, tags = entry.get("columns"), entry.get("tags") or {}
    for part, allowed in ((columns or {}, _COLUMNS), (tags, set(SHAREGPT_TAGS))):
        if not isinstance(part, dict) or not all(isinstance(v, str) or v is None for v in part.values()):
            raise DataError("columns and tags must map names to text", where=where)
        _known(part, allowed, where)
    formatting = entry.get("formatting", "alpaca")
    if formatting not in FORMATS:
        raise DataError(f"formatting {formatting!r} is unknown", where=where, fix="one of " + ", ".join(FORMATS))
    defaults, tag_defaults = {
        "alpaca": (ALPACA_COLUMNS, {}), "sharegpt": (SHAREGPT_COLUMNS, SHAREGPT_TAGS),
        "openai": (OPENAI_COLUMNS, OPENAI_TAGS), "text": ({"prompt": "text"}, {}),
    }[formatting]  # fmt: skip
    if columns is None:
        columns = dict(defaults)
    elif formatting in ("sharegpt", "openai") and "messages" not in columns:
        columns = {**columns, "messages": defaults["messages"]}
    count = entry.get("num_samples")
    if count is not None and (isinstance(count, bool) or not isinstance(count, int) or count < 1):
        raise DataError(f"num_samples must be a whole number above 0, not {json.dumps(count)}", where=where)
    spec = DatasetSpec(
        name=name,
        formatting=formatting,
        columns={k: v for k, v in columns.items() if v},
        tags={**tag_defaults, **{k: v for k, v in tags.items() if v}},
        ranking=bool(entry.get("ranking", False)),
        num_samples=count,
        subset=entry.get("subset"),
        split=entry.get("split", "train"),
        folder=entry.get("folder"),
    )
    if entry.get("file_name"):
        asked = [k for k in ("subset", "folder") if entry.get(k)] + (["split"] if spec.split != "train" else [])
        if asked:
            raise DataError(f"{asked[0]} chooses among a hub dataset's files; this one is a file", where=where)
        path = Path(entry["file_name"])
        path = path if path.is_absolute() else directory / path
        if not path.exists():
            raise DataError(f"its file {path} does not exist", where=where)
        spec.files = _files(path, name)
    elif entry.get("hf_hub_url"):
        spec.hub = str(entry["hf_hub_url"])
    else:
        other = next((k for k in ("ms_hub_url", "om_hub_url", "script_url", "cloud_file_name") if entry.get(k)), "")
        what = f"{other} is not supported" if other else "it names no file_name and no hf_hub_url"
        raise DataError(what, where=where, fix="download the data and give its path as file_name")
    return spec


def _known(part: dict[str, Any], allowed: set[str], where: str) -> None:
    for key in part:
        if key not in allowed:
            near = difflib.get_close_matches(key, allowed, 1)
            fix = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(sorted(allowed))}"
            raise DataError(f"unknown key {key!r}", where=where, fix=fix)
