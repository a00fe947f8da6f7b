"""Our own readers: each row with its place, each mistake with line and reason."""

from __future__ import annotations

import builtins
import json
from pathlib import Path
from typing import Any

import pytest

from lumen.core import DataError
from lumen.data.json_rows import parse_json
from lumen.data.lines import BadRow, Row
from lumen.data.readers import read_rows


def read(tmp_path: Path, name: str, content: str | bytes, encoding: str = "utf-8") -> list[Row | BadRow]:
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return list(read_rows(path, encoding))


def fails(tmp_path: Path, name: str, content: str | bytes, encoding: str = "utf-8") -> DataError:
    with pytest.raises(DataError) as caught:
        read(tmp_path, name, content, encoding)
    return caught.value


def test_a_list_gives_rows_with_the_lines_they_begin_on(tmp_path: Path) -> None:
    rows = read(tmp_path, "a.json", '\n[\n {"a": 1},\n\n {"a": "[x,\\n]"}, {"a": 3}\n]\n')
    assert [(row.number, row.line) for row in rows] == [(1, 3), (2, 5), (3, 5)]
    assert [row.value for row in rows if isinstance(row, Row)] == [{"a": 1}, {"a": "[x,\n]"}, {"a": 3}]


def test_lines_end_at_line_feeds_only(tmp_path: Path) -> None:
    """Python's splitlines also splits at U+2028 and others, which may stand in JSON text."""
    lines = ['{"a": "x\u2028y\x85z"}', "", '{"a": 2}']
    rows = read(tmp_path, "a.jsonl", "\r\n".join(lines))
    assert [(row.number, row.line) for row in rows] == [(1, 1), (2, 3)]


def test_jsonl_named_json_and_list_named_jsonl_are_read(tmp_path: Path) -> None:
    assert len(read(tmp_path, "a.json", '{"a": 1}\n{"a": 2}\n')) == 2
    assert len(read(tmp_path, "a.jsonl", json.dumps([{"a": 1}, {"a": 2}], indent=2))) == 2
    assert len(read(tmp_path, "b.jsonl", "[1]\n[2]\n")) == 2  # lines that are lists stay lines


@pytest.mark.parametrize(
    ("content", "what", "line"),
    [
        ('[\n{"a": 1},\n{"a": }\n]', "row 2: not JSON at column 7: expecting value", 3),
        ('[\n{"a": 1}\n{"a": 2}]', "row 2: a comma or ] must follow the row before", 3),
        ('[{"a": 1},\n{"a": 2', "row 2: the file ends inside this row", 2),
        ('[{"a": 1},\n]', "row 2: a comma before ] promises a row", 2),
        ('[{"a": 1}] x', "row 2: more text after the end of the list", 1),
        ('[{"a": 1}', "row 2: the list is not closed", 1),
        ('[\n{"a": NaN}]', "row 1: NaN is not a JSON value", 2),
        ('[\n{"a": 1e999}]', "row 1: the number 1e999 is too large", 2),
        ('[\n{"a": 1, "a": 2}]', "row 1: the key 'a' is there twice", 2),
        ("[" * 100_000, "row 1: nested deeper than 64 levels", 1),
        ('[\n{"a": "b\nc"}]', "row 1: not JSON at column 9: invalid control character", 2),
        ("[]", "the list is empty", None),
        ("", "the file is empty", None),
        ("\n \n", "the file holds nothing but blank lines", None),
        ('{"data": [{"a": 1}],\n "version": 1}', "expected a list of rows, got one object", 1),
        ("[" + "1" * 5000 + "]", "row 1: a number has too many digits", 1),
    ],
)
def test_what_spoils_a_list_names_row_and_line(tmp_path: Path, content: str, what: str, line: int | None) -> None:
    error = fails(tmp_path, "a.json", content)
    assert what in error.what
    assert error.where.endswith(f"a.json:{line}" if line else "a.json")


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"a": 1} x', "more text after the JSON value at column 10: 'x'"),
        ('{"a": 1', "the text ends inside a JSON value"),
        ('{"a": "b}', "a string that begins at column 7 is not closed"),
        ("{'a': 1}", "not JSON at column 2"),
        ('{"a": Infinity}', "Infinity is not a JSON value"),
        ('{"a": 1, "a": 1}', "the key 'a' is there twice"),
        ('{"a": ' * 80 + "1" + "}" * 80, "nested deeper than 64 levels"),
    ],
)
def test_a_bad_line_is_a_bad_row_and_the_others_are_read(tmp_path: Path, line: str, reason: str) -> None:
    rows = read(tmp_path, "a.jsonl", f'{{"a": 0}}\n{line}\n{{"a": 2}}\n')
    assert [type(row) for row in rows] == [Row, BadRow, Row]
    bad = rows[1]
    assert isinstance(bad, BadRow)
    assert (bad.number, bad.line) == (2, 2)
    assert reason in bad.reason


def test_brackets_inside_strings_are_no_depth() -> None:
    assert parse_json(json.dumps({"a": "[" * 500 + '\\"{' * 500}))["a"].startswith("[[")


def test_a_bad_byte_on_one_line_spoils_that_line_only(tmp_path: Path) -> None:
    rows = read(tmp_path, "a.jsonl", b'{"a": 0}\n{"a": "\xff"}\n{"a": 2}\n')
    assert [type(row) for row in rows] == [Row, BadRow, Row]
    assert isinstance(rows[1], BadRow)
    assert "byte 0xff at offset 16" in rows[1].reason


def test_utf16_is_named_and_read_when_asked(tmp_path: Path) -> None:
    content = '[{"a": "好"}]'.encode("utf-16")
    assert "encoding: utf-16" in fails(tmp_path, "a.json", content).fix
    (row,) = read(tmp_path, "a.json", content, "utf-16")
    assert isinstance(row, Row)
    assert row.value == {"a": "好"}
    assert len(read(tmp_path, "a.jsonl", '{"a": "好"}\n{"a": 1}'.encode("utf-16"), "utf-16")) == 2
    assert "no text encoding 'utf-99'" in fails(tmp_path, "a.json", b"[1]", "utf-99").what


def test_csv_fields_hold_line_breaks_and_wrong_widths_are_bad_rows(tmp_path: Path) -> None:
    rows = read(tmp_path, "a.csv", 'instruction,output\n"two\nlines",a\n\nb\nc,d,e\nf,"g ""h"""\n')
    assert [(type(row), row.number, row.line) for row in rows] == [
        (Row, 1, 2), (BadRow, 2, 5), (BadRow, 3, 6), (Row, 4, 7)
    ]  # fmt: skip
    assert isinstance(rows[0], Row) and isinstance(rows[1], BadRow) and isinstance(rows[3], Row)
    assert rows[0].value == {"instruction": "two\nlines", "output": "a"}
    assert rows[1].reason == "1 fields where the header has 2"
    assert rows[3].value["output"] == 'g "h"'
    assert read(tmp_path, "a.tsv", "a\tb\n1\t2\n")[0] == Row(1, 2, {"a": "1", "b": "2"})
    assert "repeated column name" in fails(tmp_path, "a.csv", "a,a\n1,2\n").what
    assert "the file has no rows" in fails(tmp_path, "a.csv", "a,b\n").what
    error = fails(tmp_path, "a.csv", 'a,b\n1,2\n3,"open\n')
    assert (error.what.split(":")[0], error.where.rsplit(":")[-1]) == ("row 2", "3")


def test_parquet_rows_have_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet as parquet

    path = tmp_path / "a.parquet"
    value = {"messages": [{"role": "user", "content": "q"}], "n": 1}
    parquet.write_table(arrow.Table.from_pylist([value, {**value, "n": 2}]), path)
    assert list(read_rows(path)) == [Row(1, None, value), Row(2, None, {**value, "n": 2})]
    error = fails(tmp_path, "b.parquet", b"PAR1 not really")
    assert "not a readable parquet file" in error.what
    real = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name.startswith("pyarrow"):
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(DataError, match="needs pyarrow") as caught:
        list(read_rows(path))
    assert "lumen-train[parquet]" in caught.value.fix


def test_text_is_a_document_a_line(tmp_path: Path) -> None:
    rows = read(tmp_path, "a.txt", "one\n\n  \ntwo \n")
    assert [(row.number, row.line, row.value) for row in rows if isinstance(row, Row)] == [
        (1, 1, {"text": "one"}), (2, 4, {"text": "two "})
    ]  # fmt: skip


def test_missing_files_and_unknown_suffixes(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such data file"):
        read_rows(tmp_path / "gone.json")
    assert "'.xml' is not read" in fails(tmp_path, "a.xml", "<a/>").what.replace(".xml is", "'.xml' is")
