"""Batches in an order that is a function of (seed, epoch, position) and of nothing else.

The order of an epoch is drawn from a generator seeded by (seed, epoch), so its state is three integers, a resumed run
sees exactly the batches it would have seen, and nothing has to be skipped by reading it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from lumen.core import DataError
from lumen.data.batch import Batch, collate
from lumen.data.examples import ExampleStore


def epoch_generator(seed: int, epoch: int) -> np.random.Generator:
    """The generator of one epoch: Philox keyed by (seed, epoch)."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, epoch])))


class Loader:
    """An endless source of batches over a store.

    batch_size:         rows of a batch (packed rows count as one).
    seed:               decides every epoch's order.
    shuffle:            False keeps the store's order.
    pad_token_id:       fills padded places; never tells padding from text.
    pad_to_multiple_of: batches are as long as their longest row, rounded up to this.
    drop_last:          leave out an epoch's last batch where it is smaller than the others.
    """

    def __init__(
        self,
        store: ExampleStore,
        batch_size: int,
        seed: int,
        *,
        packing: bool = False,
        cutoff_len: int = 2048,
        shuffle: bool = True,
        pad_token_id: int = 0,
        pad_to_multiple_of: int = 8,
        drop_last: bool = False,
        group_by_length: bool = False,
    ) -> None:
        if len(store) == 0:
            raise DataError("there is no example to train on")
        if batch_size < 1:
            raise DataError(f"batch size {batch_size}: it must be at least 1")
        if packing or group_by_length:
            raise NotImplementedError
        self.store = store
        self.batch_size = batch_size
        self.seed = seed
        self.shuffle = shuffle
        self.pad_token_id = pad_token_id
        self.pad_to_multiple_of = pad_to_multiple_of
        self.drop_last = drop_last
        self.epoch = 0
        self.position = 0
        self._plan_epoch: int | None = None
        self._plan: list[list[list[int]]] = []

    def plan(self, epoch: int) -> list[list[list[int]]]:
        """The batches of an epoch: batch → row → examples (indices into the store)."""
        if self._plan_epoch != epoch:
            order = np.arange(len(self.store))
            if self.shuffle:
                order = epoch_generator(self.seed, epoch).permutation(order)
            rows = [[int(i)] for i in order]
            batches = [rows[i : i + self.batch_size] for i in range(0, len(rows), self.batch_size)]
            if self.drop_last and len(batches) > 1 and len(batches[-1]) < self.batch_size:
                batches.pop()
            self._plan, self._plan_epoch = batches, epoch
        return self._plan

    def batches_per_epoch(self, epoch: int = 0) -> int:
        """Batches of an epoch."""
        return len(self.plan(epoch))

    def next_batch(self) -> Batch:
        """The batch at the present position; moves on, into the next epoch after the last."""
        if self.position >= self.batches_per_epoch(self.epoch):
            self.epoch, self.position = self.epoch + 1, 0
        batch = self._collate(self.plan(self.epoch)[self.position])
        self.position += 1
        return batch

    def one_pass(self) -> Iterator[Batch]:
        """The batches of epoch 0 once, without moving the state: what evaluation reads."""
        for rows in self.plan(0):
            yield self._collate(rows)

    def _collate(self, rows: list[list[int]]) -> Batch:
        return collate(
            [[self.store[i] for i in row] for row in rows],
            pad_token_id=self.pad_token_id,
            pad_to_multiple_of=self.pad_to_multiple_of,
        )

    def state(self) -> dict[str, int]:
        """Three integers: seed, epoch, position (batches taken of this epoch)."""
        return {"seed": self.seed, "epoch": self.epoch, "position": self.position}

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from a saved state."""
        self.seed = int(state["seed"])
        self.epoch, self.position = int(state["epoch"]), int(state["position"])
        self._plan_epoch = None
