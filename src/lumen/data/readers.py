"""Our own readers: every row with its place, every mistake with file, line and reason.

A data file is text written by people and scripts: truncated lines, two values on a line, a byte order mark, another
encoding, a key twice.  Each of these is an error that names the line, not a traceback and not a silent skip.  The
readers yield `Row`s and `BadRow`s; what happens to a bad row (`on_bad_rows`) is decided by the caller.

- .jsonl: one JSON value a line; blank lines are no rows.
- .json: a list of objects; also one object a line, which many files named .json are.
- .csv, .tsv: a header line, then one row a line (fields may hold line breaks in quotes).
- .parquet: needs pyarrow.
- .txt: one document a line.
"""

from __future__ import annotations

import csv
import io
import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lumen.core import DataError

SUFFIXES = (".json", ".jsonl", ".csv", ".tsv", ".parquet", ".txt")
MAX_DEPTH = 64
"""JSON nested deeper than this is refused: no row format needs it, and Python's parser overflows on what does."""


@dataclass
class Row:
    """A row that could be read. number: counted from 1 in its file. line: where it begins, or None (parquet)."""

    number: int
    line: int | None
    value: Any


@dataclass
class BadRow:
    """A row that could not be read, with the reason and what it held (text where it is not even JSON)."""

    number: int
    line: int | None
    reason: str
    held: Any = ""
    fix: str = ""


def place(path: str | Path, line: int | None, number: int) -> str:
    """Where a row is: `file:line`, with its number where several rows may share a line, or `file, row n`."""
    if line is None or line == 0:
        return f"{path}, row {number}"
    own_line = str(path).lower().endswith((".jsonl", ".txt"))
    return f"{path}:{line}" if own_line else f"{path}:{line} (row {number})"


def read_rows(path: Path, encoding: str = "utf-8") -> Iterator[Row | BadRow]:
    """Rows of one file in order.  Raises DataError for what spoils the whole file."""
    path = Path(path)
    if not path.is_file():
        raise DataError("there is no such data file", where=str(path))
    suffix = path.suffix.lower()
    if suffix == ".parquet":
        return _parquet(path)
    if suffix not in SUFFIXES:
        raise DataError(f"{suffix or 'a file without a suffix'} is not read", where=str(path), fix=_suffix_fix())
    if path.stat().st_size == 0:
        raise DataError("the file is empty", where=str(path))
    if suffix == ".txt":
        return _text(path, encoding)
    if suffix in (".csv", ".tsv"):
        return _csv(path, encoding, "\t" if suffix == ".tsv" else ",")
    return _json(path, encoding)


def _suffix_fix() -> str:
    return "name the file by what it is: " + ", ".join(SUFFIXES)


# --- text ------------------------------------------------------------------------------------------------------------


def encoding_reason(error: UnicodeDecodeError, base: int = 0) -> tuple[str, str]:
    """Reason and fix for bytes that are not in the encoding."""
    byte = error.object[error.start]
    reason = f"byte 0x{byte:02x} at offset {base + error.start} is not {error.encoding} text"
    rest = error.object[error.start : error.start + 4096]
    try:
        io.TextIOWrapper(io.BytesIO(rest), "gb18030").read(64)
        guess = "set `encoding: gb18030` (the bytes read as Chinese GBK), or convert the file to UTF-8"
    except UnicodeDecodeError:
        guess = "set `encoding:` to what the file is written in (`gb18030` for Chinese GBK), or convert it to UTF-8"
    return reason, guess


def _lines(path: Path, encoding: str) -> Iterator[tuple[int, str | BadRow]]:
    """(line number from 1, text without its line end), or a BadRow where the bytes are not in the encoding."""
    if _wide(encoding):
        for number, line in enumerate(_whole(path, encoding).split("\n"), 1):
            yield number, line.removesuffix("\r")
        return
    with path.open("rb") as file:
        offset = 0
        for number, raw in enumerate(file, 1):
            body = raw.removeprefix(b"\xef\xbb\xbf") if number == 1 else raw
            try:
                yield number, body.rstrip(b"\r\n").decode(encoding)
            except UnicodeDecodeError as error:
                base = offset + len(raw) - len(body)
                if base == 0 and raw[:2] in (b"\xff\xfe", b"\xfe\xff"):
                    raise DataError(
                        "the file is UTF-16", where=str(path), fix="set `encoding: utf-16`, or convert it to UTF-8"
                    ) from None
                reason, fix = encoding_reason(error, base)
                yield number, BadRow(0, number, reason, repr(body[:200]), fix)
            offset += len(raw)


def _wide(encoding: str) -> bool:
    """Encodings whose line feed is more than one byte cannot be split before decoding."""
    try:
        return "\n".encode(encoding) != b"\n"
    except LookupError:
        raise DataError(
            f"there is no text encoding {encoding!r}", where="encoding", fix="utf-8, gb18030, utf-16, latin-1, ..."
        ) from None


def _whole(path: Path, encoding: str) -> str:
    """The file's text; a byte order mark is dropped."""
    _wide(encoding)
    data = path.read_bytes()
    base = 3 if data.startswith(b"\xef\xbb\xbf") else 0
    try:
        return data[base:].decode(encoding).removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        line = data[: base + error.start].count(b"\n") + 1
        reason, fix = encoding_reason(error, base)
        if data[:2] in (b"\xff\xfe", b"\xfe\xff"):
            reason, fix = "the file is UTF-16", "set `encoding: utf-16`, or convert it to UTF-8"
        raise DataError(reason, where=f"{path}:{line}", fix=fix) from None


# --- JSON ------------------------------------------------------------------------------------------------------------


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
    if end < len(stripped):
        raise ValueError(f"more text after the JSON value at column {end + 1}: {stripped[end : end + 20]!r}")
    return value


def _json(path: Path, encoding: str) -> Iterator[Row | BadRow]:
    """A list of rows or one row a line, whichever the file's first character says."""
    first = ""
    for _, line in _lines(path, encoding):
        first = "?" if isinstance(line, BadRow) else line.lstrip()[:1]
        if first:
            break
    if not first:
        raise DataError("the file holds nothing but blank lines", where=str(path))
    if first == "[" and not _line_of_list(path, encoding):
        yield from _json_list(path, _whole(path, encoding))
    elif first == "{" and path.suffix.lower() == ".json" and not _first_line_is_value(path, encoding):
        yield from _json_object(path, _whole(path, encoding))
    else:
        yield from _json_lines(path, encoding)


def _line_of_list(path: Path, encoding: str) -> bool:
    """A .jsonl whose lines are lists is lines; their rows are then refused one by one."""
    if path.suffix.lower() != ".jsonl":
        return False
    values = 0
    for _, line in _lines(path, encoding):
        if isinstance(line, str) and line.strip():
            if not _is_json(line):
                return False
            values += 1
            if values == 2:
                return True
    return False


def _first_line_is_value(path: Path, encoding: str) -> bool:
    for _, line in _lines(path, encoding):
        if isinstance(line, BadRow) or line.strip():
            return isinstance(line, str) and line.strip() != "{" and (_is_json(line) or "}" in line)
    return False


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
    number = 0
    for line_number, line in _lines(path, encoding):
        if isinstance(line, BadRow):
            number += 1
            line.number = number
            yield line
            continue
        if not line.strip():
            continue
        number += 1
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


# --- csv, text, parquet ----------------------------------------------------------------------------------------------


def _csv(path: Path, encoding: str, delimiter: str) -> Iterator[Row | BadRow]:
    text = _whole(path, encoding)
    csv.field_size_limit(1 << 30)
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    header: list[str] | None = None
    number, line = 0, 1
    while True:
        try:
            cells = next(reader)
        except StopIteration:
            break
        except csv.Error as error:
            # The reader has lost its place (an open quote swallows what follows), so nothing after it is certain.
            raise DataError(
                f"row {number + 1}: {error}", where=f"{path}:{line}", fix="quote fields as csv asks"
            ) from None
        begins, line = line, reader.line_num + 1
        if not any(cell.strip() for cell in cells):
            continue
        if header is None:
            header = [cell.strip() for cell in cells]
            if len(set(header)) < len(header) or "" in header:
                raise DataError("the header has an empty or a repeated column name", where=f"{path}:{begins}")
            continue
        number += 1
        if len(cells) != len(header):
            reason = f"{len(cells)} fields where the header has {len(header)}"
            yield BadRow(number, begins, reason, delimiter.join(cells)[:500], "quote fields that hold the delimiter")
        else:
            yield Row(number, begins, dict(zip(header, cells, strict=True)))
    if number == 0:
        raise DataError("the file has no rows", where=str(path))


def _text(path: Path, encoding: str) -> Iterator[Row | BadRow]:
    number = 0
    for line_number, line in _lines(path, encoding):
        if isinstance(line, BadRow):
            number += 1
            line.number = number
            yield line
        elif line.strip():
            number += 1
            yield Row(number, line_number, {"text": line})
    if number == 0:
        raise DataError("the file holds nothing but blank lines", where=str(path))


def _parquet(path: Path) -> Iterator[Row | BadRow]:
    try:
        import pyarrow as arrow
        import pyarrow.parquet as parquet
    except ImportError:
        raise DataError(
            "parquet needs pyarrow, which is not installed", where=str(path), fix="pip install 'lumen-train[parquet]'"
        ) from None
    try:
        with parquet.ParquetFile(path) as file:
            number = 0
            for batch in file.iter_batches(batch_size=1024):
                for value in batch.to_pylist():
                    number += 1
                    yield Row(number, None, value)
    except (arrow.ArrowException, OSError, ValueError) as error:
        raise DataError(f"not a readable parquet file: {error}", where=str(path)) from None
    if number == 0:
        raise DataError("the file has no rows", where=str(path))
