"""Packing: every example once, no row too long, rows nearly full, another order in every epoch."""

from __future__ import annotations

import numpy as np
import pytest

from lumen.data.examples import IGNORE, Example, ExampleStore
from lumen.data.loader import Loader, epoch_generator
from lumen.data.packing import efficiency, pack


def some_lengths(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).lognormal(4.5, 0.8, count).astype(np.int64).clip(2, 512)


@pytest.mark.parametrize("seed", range(3))
def test_every_example_is_in_one_row_and_rows_are_nearly_full(seed: int) -> None:
    lengths = some_lengths(2000, seed)
    rows = pack(lengths, 512, epoch_generator(seed, 0))
    assert sorted(i for row in rows for i in row) == list(range(2000))
    assert max(lengths[row].sum() for row in rows) <= 512
    assert efficiency(rows, lengths, 512) > 0.97
    assert len(rows) <= 1.02 * np.ceil(lengths.sum() / 512)


def test_order_depends_on_seed_and_epoch_only() -> None:
    lengths = some_lengths(300)
    first = pack(lengths, 512, epoch_generator(1, 0))
    assert first == pack(lengths, 512, epoch_generator(1, 0))
    assert first != pack(lengths, 512, epoch_generator(1, 1))
    assert first != pack(lengths, 512, epoch_generator(2, 0))


def test_without_shuffling_the_files_order_is_kept() -> None:
    rows = pack(np.array([3, 4, 5, 9, 1]), 8)
    assert rows == [[0, 1], [2], [3], [4]]  # an example longer than a row has one of its own


def test_packed_batch_restarts_positions_and_never_predicts_across() -> None:
    a, b = np.array([1, 2, 3]), np.array([4, 5, 6, 7, 8])
    loader = Loader(
        ExampleStore.from_examples([Example(a, a), Example(b, b)]),
        1, seed=0, packing=True, cutoff_len=8, shuffle=False, pad_to_multiple_of=10,
    )  # fmt: skip
    batch = loader.next_batch()
    assert batch.packed
    assert batch.input_ids.tolist() == [[1, 2, 3, 4, 5, 6, 7, 8, 0, 0]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 0, 1, 2, 3, 4, 0, 0]]
    assert batch.segment_ids.tolist() == [[1, 1, 1, 2, 2, 2, 2, 2, 0, 0]]
    assert batch.labels.tolist() == [[IGNORE, 2, 3, IGNORE, 5, 6, 7, 8, IGNORE, IGNORE]]


def test_group_by_length_leaves_less_padding_and_shows_the_longest_first() -> None:
    examples = [Example(np.full(n, 5), np.full(n, 5)) for n in some_lengths(400)]
    store = ExampleStore.from_examples(examples)

    def padding(loader: Loader) -> float:
        batches = list(loader.one_pass())
        assert sum(batch.num_tokens for batch in batches) == store.lengths.sum()
        return 1 - sum(b.num_tokens for b in batches) / sum(b.input_ids.numel() for b in batches)

    plain, grouped = Loader(store, 4, seed=0), Loader(store, 4, seed=0, group_by_length=True)
    assert padding(grouped) < 0.5 * padding(plain)
    assert grouped.next_batch().input_ids.shape[1] >= store.lengths.max()
    assert grouped.plan(0) == Loader(store, 4, seed=0, group_by_length=True).plan(0)
    assert grouped.plan(1) != grouped.plan(2)


def test_drop_last_leaves_out_the_small_batch_only() -> None:
    store = ExampleStore.from_examples([Example(np.array([1, 2]), np.array([IGNORE, 2]))] * 7)
    assert [len(b) for b in Loader(store, 3, seed=0).plan(0)] == [3, 3, 1]
    assert [len(b) for b in Loader(store, 3, seed=0, drop_last=True).plan(0)] == [3, 3]
    assert [len(b) for b in Loader(store, 9, seed=0, drop_last=True).plan(0)] == [7]  # never nothing at all
