"""Rows, their places, and text files line by line with exact complaints about bytes."""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lumen.core import DataError


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


def lines_of(path: Path, encoding: str) -> Iterator[tuple[int, str | BadRow]]:
    """(line number from 1, text without its line end), or a BadRow where the bytes are not in the encoding."""
    if _wide(encoding):
        for number, line in enumerate(text_of_file(path, encoding).split("\n"), 1):
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


def numbered_lines(path: Path, encoding: str) -> Iterator[tuple[int, int, str] | BadRow]:
    """(row number from 1, line number, text) of every line that is not blank; a numbered BadRow for bad bytes."""
    row = 0
    for line_number, line in lines_of(path, encoding):
        if isinstance(line, BadRow):
            row += 1
            line.number = row
            yield line
        elif line.strip():
            row += 1
            yield row, line_number, line


def _wide(encoding: str) -> bool:
    """Encodings whose line feed is more than one byte cannot be split before decoding."""
    try:
        return "\n".encode(encoding) != b"\n"
    except LookupError:
        raise DataError(
            f"there is no text encoding {encoding!r}", where="encoding", fix="utf-8, gb18030, utf-16, latin-1, ..."
        ) from None


def text_of_file(path: Path, encoding: str) -> str:
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
