"""Tokenised examples in compact arrays.

A table holds one dataset: all token ids end to end (int32), one byte per token that says whether it is learned, and
where each example begins.  The arrays are .npy files that the cache maps into memory, so a set larger than memory is
no matter.  A store is a list of picks (table, example) over tables: splitting, mixing and repeating move no tokens.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from lumen.core import DataError
from lumen.data.lines import place

IGNORE = -100
"""The label of a token that is not learned."""


@dataclass
class Example:
    """One tokenised example.

    input_ids: int32 or int64 array [T].
    labels:    array [T]; the token's id where it is learned, -100 elsewhere; the first is always -100.
    source:    `file:line` or `file, row n`: where it came from.
    """

    input_ids: np.ndarray
    labels: np.ndarray
    source: str = ""


@dataclass
class Table:
    """The examples of one dataset.

    ids:     int32 [N], all tokens end to end.       learned: uint8 [N], 1 where a token is learned.
    offsets: int64 [examples + 1], where each begins.
    files, lines, rows: int32, int64, int64 [examples]: number of the file, line (0: it has none), row.
    meta:    `files`, the names, and `fingerprint`.
    """

    ids: np.ndarray
    learned: np.ndarray
    offsets: np.ndarray
    files: np.ndarray
    lines: np.ndarray
    rows: np.ndarray
    meta: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def from_examples(
        cls, items: Iterable[tuple[np.ndarray, np.ndarray, int, int, int]], meta: dict[str, Any] | None = None
    ) -> Table:
        """Gather (ids, learned, file number, line or 0, row) into arrays."""
        ids, learned, offsets, places = [], [], [0], []
        for tokens, mask, *where in items:
            ids.append(np.asarray(tokens, np.int32))
            mask = np.asarray(mask, np.uint8).copy()
            mask[:1] = 0
            learned.append(mask)
            offsets.append(offsets[-1] + len(tokens))
            places.append(where)
        where_from = np.asarray(places, np.int64).reshape(-1, 3)
        return cls(
            ids=np.concatenate(ids) if ids else np.zeros(0, np.int32),
            learned=np.concatenate(learned) if learned else np.zeros(0, np.uint8),
            offsets=np.asarray(offsets, np.int64),
            files=where_from[:, 0].astype(np.int32),
            lines=where_from[:, 1].copy(),
            rows=where_from[:, 2].copy(),
            meta=meta or {},
        )

    ARRAYS = ("ids", "learned", "offsets", "files", "lines", "rows")

    def save(self, directory: Path) -> None:
        """Write the arrays and `meta.json` into an existing directory."""
        for name in self.ARRAYS:
            np.save(directory / f"{name}.npy", getattr(self, name), allow_pickle=False)
        (directory / "meta.json").write_text(json.dumps(self.meta, ensure_ascii=False), "utf-8")

    @classmethod
    def load(cls, directory: Path) -> Table:
        """Map a saved table into memory.  Raises ValueError or OSError where the files are damaged."""
        arrays = {
            name: np.load(directory / f"{name}.npy", mmap_mode="r" if name in ("ids", "learned") else None)
            for name in cls.ARRAYS
        }
        table = cls(**arrays, meta=json.loads((directory / "meta.json").read_text("utf-8")))
        if not (len(table.ids) == len(table.learned) == table.offsets[-1] and len(table.files) == len(table)):
            raise ValueError("the arrays do not fit together")
        return table

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def fingerprint(self) -> str:
        """Hex digest of the tokens, masks and boundaries."""
        if "fingerprint" not in self.meta:
            digest = hashlib.sha256()
            for array in (self.ids, self.learned, self.offsets):
                digest.update(np.ascontiguousarray(array).data if len(array) else b"")
            self.meta["fingerprint"] = digest.hexdigest()
        return str(self.meta["fingerprint"])

    def source(self, index: int) -> str:
        """Where an example comes from: `file:line`, or `file, row n`."""
        name = self.meta["files"][int(self.files[index])]
        return place(name, int(self.lines[index]), int(self.rows[index]))


class ExampleStore(Sequence[Example]):
    """Examples by index: picks over one or more tables.

    tables: where the tokens are.
    picks:  int64 [n, 2] of (table, example); None takes all in order.
    """

    def __init__(self, tables: Sequence[Table], picks: np.ndarray | None = None) -> None:
        self.tables = list(tables)
        if picks is None:
            parts = [
                np.stack([np.full(len(table), t, np.int64), np.arange(len(table))], 1)
                for t, table in enumerate(self.tables)
            ]
            picks = np.concatenate(parts) if parts else np.zeros((0, 2), np.int64)
        self.picks = np.asarray(picks, np.int64).reshape(-1, 2)
        self._lengths: np.ndarray | None = None
        self._loss_lengths: np.ndarray | None = None

    @classmethod
    def from_examples(cls, examples: Iterable[Example]) -> ExampleStore:
        """A store in memory, for tests and for code that has its own tokens."""
        files: dict[str, int] = {}
        items = []
        for number, example in enumerate(examples, 1):
            labels = np.asarray(example.labels)
            ids = np.asarray(example.input_ids)
            learned = labels != IGNORE
            if (labels[learned] != ids[learned]).any():
                raise DataError("labels must be the token's own id or -100 (they are not shifted)", where=f"{number}")
            file = files.setdefault(example.source or "memory", len(files))
            items.append((ids, learned, file, 0, number))
        return cls([Table.from_examples(items, {"files": list(files)})])

    def __len__(self) -> int:
        return len(self.picks)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return self.select(np.arange(len(self))[index])
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        t, i = self.picks[index]
        table = self.tables[t]
        start, stop = int(table.offsets[i]), int(table.offsets[i + 1])
        ids = np.asarray(table.ids[start:stop], np.int64)
        learned = np.asarray(table.learned[start:stop], bool)
        return Example(ids, np.where(learned, ids, IGNORE), table.source(int(i)))

    def __iter__(self) -> Iterator[Example]:
        return (self[i] for i in range(len(self)))

    def select(self, indices: np.ndarray | Sequence[int]) -> ExampleStore:
        """A view of these examples, in this order."""
        return ExampleStore(self.tables, self.picks[np.asarray(indices, np.int64)])

    @property
    def lengths(self) -> np.ndarray:
        """int64 [n]: tokens of each example."""
        if self._lengths is None:
            self._lengths = self._per_example([np.diff(table.offsets) for table in self.tables])
        return self._lengths

    @property
    def loss_lengths(self) -> np.ndarray:
        """int64 [n]: learned tokens of each example."""
        if self._loss_lengths is None:
            sums = []
            for table in self.tables:
                running = np.concatenate([[0], np.cumsum(table.learned, dtype=np.int64)])
                sums.append(running[table.offsets[1:]] - running[table.offsets[:-1]])
            self._loss_lengths = self._per_example(sums)
        return self._loss_lengths

    def _per_example(self, values: list[np.ndarray]) -> np.ndarray:
        result = np.zeros(len(self), np.int64)
        for t, value in enumerate(values):
            mine = self.picks[:, 0] == t
            result[mine] = value[self.picks[mine, 1]]
        return result

    @property
    def fingerprint(self) -> str:
        """Hex digest of what the store holds, in order: equal means the same tokens in the same places."""
        digest = hashlib.sha256()
        for table in self.tables:
            digest.update(table.fingerprint.encode())
        digest.update(np.ascontiguousarray(self.picks).tobytes())
        return digest.hexdigest()
