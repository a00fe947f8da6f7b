"""Packing: several examples in one row, so that little of a batch is padding.

Which examples share a row is bin packing.  Best-fit decreasing takes the longest example first and puts each into the
fullest row that still has room for it; on real length distributions it leaves a few percent of the rows' places empty.
Examples of equal length are interchangeable, so a seeded order among them gives each epoch other rows at the same
efficiency.

Sharing a row is all they share: `segment_ids` tell attention which tokens belong together and positions restart, so a
packed example gives the loss that it gives alone.
"""

from __future__ import annotations

from bisect import bisect_left, insort

import numpy as np


def pack(lengths: np.ndarray, capacity: int, generator: np.random.Generator | None = None) -> list[list[int]]:
    """Rows of example indices, each of at most `capacity` tokens (an example longer than that has a row of its own).

    lengths:   int [n] tokens of each example.
    generator: decides among equals, the order in a row and the order of rows; None keeps the examples' order and fills
               one row after the other, which packs less tightly.
    """
    if generator is None:
        return _in_order(lengths, capacity)
    order = generator.permutation(len(lengths))
    order = order[np.argsort(-lengths[order], kind="stable")]
    rows: list[list[int]] = []
    with_room: dict[int, list[int]] = {}  # free places → the rows that have so many
    spaces: list[int] = []  # its keys, sorted
    for index in order.tolist():
        length = int(lengths[index])
        at = bisect_left(spaces, length)
        if at < len(spaces):
            space = spaces[at]
            row = with_room[space].pop()
            if not with_room[space]:
                del with_room[space]
                spaces.pop(at)
            rows[row].append(index)
        else:
            space, row = capacity, len(rows)
            rows.append([index])
        left = space - length
        if left > 0:
            if left not in with_room:
                with_room[left] = []
                insort(spaces, left)
            with_room[left].append(row)
    return [[rows[r][i] for i in generator.permutation(len(rows[r]))] for r in generator.permutation(len(rows))]


def _in_order(lengths: np.ndarray, capacity: int) -> list[list[int]]:
    rows: list[list[int]] = []
    room = 0
    for index, length in enumerate(lengths.tolist()):
        if not rows or length > room:
            rows.append([])
            room = capacity
        rows[-1].append(index)
        room -= length
    return rows


def efficiency(rows: list[list[int]], lengths: np.ndarray, capacity: int) -> float:
    """Share of the rows' places that hold tokens, 0 to 1."""
    return float(lengths[[i for row in rows for i in row]].sum() / (len(rows) * capacity)) if rows else 0.0
