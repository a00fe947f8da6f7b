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
from collections.abc import Iterator
from pathlib import Path

from lumen.core import DataError
from lumen.data.json_rows import read_json
from lumen.data.lines import BadRow, Row, numbered_lines, place, text_of_file

__all__ = ["SUFFIXES", "BadRow", "Row", "place", "read_rows"]

SUFFIXES = (".json", ".jsonl", ".csv", ".tsv", ".parquet", ".txt")


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
    return read_json(path, encoding)


def _suffix_fix() -> str:
    return "name the file by what it is: " + ", ".join(SUFFIXES)


def _csv(path: Path, encoding: str, delimiter: str) -> Iterator[Row | BadRow]:
    text = text_of_file(path, encoding)
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
    found: tuple[int, int, str] | BadRow | None = None
    for found in numbered_lines(path, encoding):
        yield found if isinstance(found, BadRow) else Row(found[0], found[1], {"text": found[2]})
    if found is None:
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
