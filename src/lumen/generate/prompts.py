"""Read the prompts of a file: plain lines, or rows in the formats that training reads.

- `.txt`: one prompt a line, blank lines are skipped;
- `.json`, `.jsonl`, `.csv`, `.parquet`: a text; `prompt`; `messages` (OpenAI); `conversations` (sharegpt); or alpaca's
  `instruction`, `input`, `system`, `history`.  A last assistant turn, or alpaca's `output`, is the reference and is not
  shown to the model.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lumen.core import DataError
from lumen.data.readers import BadRow, place, read_rows

_SHAREGPT = {"human": "user", "gpt": "assistant", "system": "system", "user": "user", "assistant": "assistant",
             "observation": "tool", "tool": "tool"}  # fmt: skip


@dataclass
class FilePrompt:
    """A prompt and where it stands.

    messages:  the conversation to answer.
    reference: the answer that the row has, if any.
    tools:     the row's tools, if any.
    """

    messages: list[dict[str, Any]]
    place: str
    reference: str | None = None
    tools: Any = None


def read_prompts(path: Path | str, *, encoding: str = "utf-8") -> list[FilePrompt]:
    """Every prompt of a file.  Raises DataError with file:line for rows that are no prompts."""
    prompts = []
    for row in read_rows(Path(path), encoding):
        where = place(path, row.line, row.number)
        if isinstance(row, BadRow):
            raise DataError(row.reason, where=where, fix=row.fix)
        if isinstance(row.value, str) and not row.value.strip():
            continue
        prompts.append(_prompt(row.value, where))
    if not prompts:
        raise DataError("the file has no prompts", where=str(path), fix="one prompt a line, or rows with `prompt`")
    return prompts


def _prompt(value: Any, where: str) -> FilePrompt:
    if isinstance(value, str):
        return FilePrompt([{"role": "user", "content": value}], where)
    if isinstance(value, list):
        value = {"messages": value}
    if not isinstance(value, dict):
        raise DataError(f"expected a text or an object, got {type(value).__name__}", where=where)
    tools = value.get("tools") or None
    for column in ("messages", "conversations"):
        if value.get(column):
            return _conversation(value[column], column, where, tools)
    system, history = value.get("system"), value.get("history") or []
    messages = [{"role": "system", "content": str(system)}] if system else []
    for pair in history if isinstance(history, list) else []:
        if not (isinstance(pair, list) and len(pair) == 2):
            raise DataError("expected pairs of texts", where=f"{where}, field history")
        messages += [{"role": "user", "content": str(pair[0])}, {"role": "assistant", "content": str(pair[1])}]
    parts = [value.get(name) for name in ("instruction", "prompt", "query", "input", "text", "question")]
    for part in parts:
        if part is not None and not isinstance(part, str):
            raise DataError(f"expected text, got {type(part).__name__}", where=where)
    user = "\n".join(part for part in parts if part)
    if not user:
        names = ", ".join(map(str, value)) or "nothing"
        raise DataError(f"the row has no prompt, only: {names}", where=where, fix="prompt, messages or instruction")
    reference = next((value[n] for n in ("output", "response", "answer") if isinstance(value.get(n), str)), None)
    return FilePrompt([*messages, {"role": "user", "content": user}], where, reference, tools)


def _conversation(turns: Any, column: str, where: str, tools: Any) -> FilePrompt:
    messages: list[dict[str, Any]] = []
    for number, turn in enumerate(turns if isinstance(turns, list) else [None]):
        if not isinstance(turn, dict):
            raise DataError("expected a list of turns", where=f"{where}, field {column}[{number}]")
        role = turn.get("role", turn.get("from"))
        if role not in _SHAREGPT:
            raise DataError(f"the role {role!r} is unknown", where=f"{where}, field {column}[{number}]",
                            fix=f"one of {', '.join(_SHAREGPT)}")  # fmt: skip
        content = turn.get("content", turn.get("value"))
        if content is not None and not isinstance(content, str):
            raise DataError("expected text", where=f"{where}, field {column}[{number}]")
        extra = {key: turn[key] for key in ("tool_calls", "reasoning_content") if turn.get(key)}
        messages.append({"role": _SHAREGPT[role], "content": content or "", **extra})
    reference = messages.pop()["content"] if messages and messages[-1]["role"] == "assistant" else None
    if not messages:
        raise DataError("the conversation has nothing to answer", where=where)
    return FilePrompt(messages, where, reference, tools)
