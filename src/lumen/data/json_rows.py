"""Strict JSON: one value a line, or a list of rows read element by element with the line of each.

Python's parser accepts NaN, keys that are there twice and numbers that overflow to infinity, and runs out of stack on
deep nesting.  In training data each of these is a mistake of whoever wrote the file, so each is one here.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lumen.core import DataError
from lumen.data.lines import BadRow, Row, lines_of, numbered_lines, text_of_file

MAX_DEPTH = 64
"""JSON nested deeper than this is refused: no row format needs it, and Python's parser overflows on what does."""


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice!r} is there twice")
    return result


def _constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON value")


def _float(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"the number {text[:20]} is too large")
    return value


DECODER = json.JSONDecoder(object_pairs_hook=_pairs, parse_constant=_constant, parse_float=_float)


def _too_deep(text: str) -> bool:
    """Whether brackets outside of strings nest deeper than MAX_DEPTH."""
    if text.count("[") + text.count("{") <= MAX_DEPTH:
        return False
    depth = 0
    for token in re.finditer(r'"(?:[^"\\]|\\.)*"?|[\[{]|[\]}]', text):
        first = token.group()[0]
        depth += (first in "[{") - (first in "]}")
        if depth > MAX_DEPTH:
            return True
    return False


def _explain(error: Exception) -> str:
    """A JSON error in plain words."""
    if isinstance(error, json.JSONDecodeError):
        if error.pos >= len(error.doc.rstrip()):
            return "the text ends inside a JSON value (truncated?)"
        if error.msg.startswith("Unterminated string"):
            return f"a string that begins at column {error.colno} is not closed"
        return f"not JSON at column {error.colno}: {error.msg[0].lower() + error.msg[1:]}"
    if isinstance(error, RecursionError):
        return f"nested deeper than {MAX_DEPTH} levels"
    message = str(error)
    return "a number has too many digits" if "integer string conversion" in message else message


def parse_json(text: str) -> Any:
    """One strict JSON value.  Raises ValueError with a plain reason: also for NaN, a key twice, deep nesting."""
    stripped = text.strip(" \t\r\n")
    if _too_deep(stripped):
        raise ValueError(f"nested deeper than {MAX_DEPTH} levels")
    try:
        value, end = DECODER.raw_decode(stripped)
    except (ValueError, RecursionError) as error:
        raise ValueError(_explain(error)) from None
    rest = stripped[end:].lstrip()
    if rest:
        raise ValueError(f"more text after the JSON value at column {len(stripped) - len(rest) + 1}: {rest[:20]!r}")
    return value


def read_json(path: Path, encoding: str) -> Iterator[Row | BadRow]:
    """A list of rows or one row a line, whichever the file's first character says."""
    first = ""
    for _, line in lines_of(path, encoding):
        first = "?" if isinstance(line, BadRow) else line.lstrip()[:1]
        if first:
            break
    if not first:
        raise DataError("the file holds nothing but blank lines", where=str(path))
    if first == "[" and not _line_of_list(path, encoding):
        yield from _json_list(path, text_of_file(path, encoding))
    elif first == "{" and path.suffix.lower() == ".json" and not _one_object_a_line(path, encoding):
        yield from _json_object(path, text_of_file(path, encoding))
    else:
        yield from _json_lines(path, encoding)


def _line_of_list(path: Path, encoding: str) -> bool:
    """A .jsonl whose lines are lists is lines; their rows are then refused one by one."""
    if path.suffix.lower() != ".jsonl":
        return False
    values = 0
    for _, line in lines_of(path, encoding):
        if isinstance(line, str) and line.strip():
            if not _is_json(line):
                return False
            values += 1
            if values == 2:
                return True
    return False


def _one_object_a_line(path: Path, encoding: str) -> bool:
    """Whether a .json that begins with { is lines: its first is a value, or several begin with { and it is not one."""
    lines = [line for _, line in lines_of(path, encoding) if isinstance(line, BadRow) or line.strip()]
    first = lines[0]
    if isinstance(first, BadRow) or _is_json(first):
        return True
    begin = sum(isinstance(line, str) and line.startswith("{") for line in lines)
    return begin > 1 and not _is_json(text_of_file(path, encoding))


def _is_json(line: str) -> bool:
    try:
        parse_json(line)
    except ValueError:
        return False
    return True


def _json_object(path: Path, text: str) -> Iterator[Row | BadRow]:
    """A file that is one object: not a list of rows."""
    try:
        value = parse_json(text)
    except ValueError as error:
        raise DataError(str(error), where=f"{path}:{_error_line(text)}", fix="a list of rows, [{...}, {...}]") from None
    lists = [key for key, item in value.items() if isinstance(item, list)]
    inside = f"; its rows seem to be under {lists[0]!r}" if lists else ""
    raise DataError(
        f"expected a list of rows, got one object with the keys {', '.join(map(repr, list(value)[:8]))}{inside}",
        where=f"{path}:1",
        fix="write the rows as [{...}, {...}], or one object a line as .jsonl",
    )


def _error_line(text: str) -> int:
    try:
        DECODER.raw_decode(text.lstrip())
    except json.JSONDecodeError as error:
        return error.lineno + text[: len(text) - len(text.lstrip())].count("\n")
    except (ValueError, RecursionError):
        pass
    return 1


def _json_lines(path: Path, encoding: str) -> Iterator[Row | BadRow]:
    for found in numbered_lines(path, encoding):
        if isinstance(found, BadRow):
            yield found
            continue
        number, line_number, line = found
        try:
            yield Row(number, line_number, parse_json(line))
        except ValueError as error:
            yield BadRow(number, line_number, str(error), line[:500], "one JSON object a line")


_SPACE = re.compile(r"[ \t\r\n]*")


def _json_list(path: Path, text: str) -> Iterator[Row | BadRow]:
    """Elements of a list one by one, each with the line it begins on.

    A syntax error inside a list spoils the file: where the next row begins could only be guessed, and a guess may
    train on half a row.  So it is raised also where bad rows are skipped.
    """

    def fail(reason: str, position: int) -> DataError:
        line = text.count("\n", 0, min(position, len(text))) + 1
        fix = "correct the file; rows after a syntax error in a list cannot be told apart (.jsonl can skip such rows)"
        return DataError(f"row {number + 1}: {reason}", where=f"{path}:{line}", fix=fix)

    def skip(position: int) -> int:
        match = _SPACE.match(text, position)
        return match.end() if match else position

    number, line, counted = 0, 1, 0
    position = skip(skip(0) + 1)
    if text[position : position + 1] == "]" and skip(position + 1) == len(text):
        raise DataError("the list is empty", where=str(path))
    while True:
        try:
            value, end = DECODER.raw_decode(text, position)
        except json.JSONDecodeError as error:
            if error.pos >= len(text.rstrip()):
                raise fail("the file ends inside this row (truncated?)", position) from None
            raise fail(_explain(error), error.pos) from None
        except (ValueError, RecursionError) as error:
            raise fail(_explain(error), position) from None
        number += 1
        line += text.count("\n", counted, position)
        counted = position
        if _too_deep(text[position:end]):
            yield BadRow(number, line, f"nested deeper than {MAX_DEPTH} levels", text[position : position + 200])
        else:
            yield Row(number, line, value)
        position = skip(end)
        mark = text[position : position + 1]
        if mark == "]":
            if skip(position + 1) != len(text):
                raise fail("more text after the end of the list", skip(position + 1))
            return
        if mark != ",":
            raise fail("a comma or ] must follow the row before" if mark else "the list is not closed", position)
        position = skip(position + 1)
        if text[position : position + 1] == "]":
            raise fail("a comma before ] promises a row that is not there", position)
