"""Batches in an order that is a function of (seed, epoch, position) and of nothing else.

The order of an epoch is drawn from a generator seeded by (seed, epoch), so its state is three integers, a resumed run
sees exactly the batches it would have seen, and nothing has to be skipped by reading it.

An epoch's plan (which examples share a row, which rows share a batch) is made from the lengths alone, without touching
a token:

- plain: a seeded permutation, cut into batches;
- packing: best-fit rows of at most `cutoff_len` tokens (`packing.pack`), then batches of such rows;
- group_by_length: examples of like length share a batch, so little is padding without packing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from lumen.core import DataError, note
from lumen.data.batch import Batch, collate
from lumen.data.config import DataConfig
from lumen.data.examples import ExampleStore
from lumen.data.packing import pack


def epoch_generator(seed: int, epoch: int) -> np.random.Generator:
    """The generator of one epoch: Philox keyed by (seed, epoch)."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, epoch])))


class Loader:
    """An endless source of batches over a store.

    batch_size:         rows of a batch (packed rows count as one).
    seed:               decides every epoch's order.
    packing:            put several examples in a row.
    cutoff_len:         tokens of a packed row at most.
    shuffle:            False keeps the store's order.
    pad_token_id:       fills padded places; never tells padding from text.
    pad_to_multiple_of: batches are as long as their longest row (packed: as cutoff_len), rounded up to this.
    drop_last:          leave out an epoch's last batch where it is smaller than the others.
    group_by_length:    batches of examples of like length; the batch with the longest comes first, so that a lack of
                        memory shows at once. Ignored where rows are packed.
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
        self.store = store
        self.batch_size = batch_size
        self.seed = seed
        self.packing = packing
        self.cutoff_len = cutoff_len
        self.shuffle = shuffle
        self.group_by_length = group_by_length and not packing
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
            generator = epoch_generator(self.seed, epoch) if self.shuffle else None
            if self.group_by_length:
                batches = self._grouped(generator)
            else:
                rows = self._rows(generator)
                batches = [rows[i : i + self.batch_size] for i in range(0, len(rows), self.batch_size)]
            if self.drop_last and len(batches) > 1:
                batches = [batch for batch in batches if len(batch) == self.batch_size] or batches
            self._plan, self._plan_epoch = batches, epoch
        return self._plan

    def _rows(self, generator: np.random.Generator | None) -> list[list[int]]:
        if self.packing:
            return pack(self.store.lengths, self.cutoff_len, generator)
        order = np.arange(len(self.store)) if generator is None else generator.permutation(len(self.store))
        return [[int(i)] for i in order]

    def _grouped(self, generator: np.random.Generator | None) -> list[list[list[int]]]:
        """Sort within stretches of 50 batches: lengths agree within a batch, and the order stays random across them."""
        order = np.arange(len(self.store)) if generator is None else generator.permutation(len(self.store))
        lengths, stretch = self.store.lengths, 50 * self.batch_size
        batches = []
        for start in range(0, len(order), stretch):
            part = order[start : start + stretch]
            part = part[np.argsort(-lengths[part], kind="stable")]
            batches += [[[int(i)] for i in part[j : j + self.batch_size]] for j in range(0, len(part), self.batch_size)]
        if generator is not None:
            batches = [batches[i] for i in generator.permutation(len(batches))]
            longest = max(range(len(batches)), key=lambda n: max(lengths[row[0]] for row in batches[n]))
            batches[0], batches[longest] = batches[longest], batches[0]
        return batches

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
            pad_to=self.cutoff_len if self.packing else 0,
        )

    @property
    def fixed_length(self) -> bool:
        """Whether every batch has rows of one length (packed rows are padded to cutoff_len), which compiling likes."""
        return self.packing or int(self.store.lengths.min()) == int(self.store.lengths.max())

    def state(self) -> dict[str, int]:
        """Three integers: seed, epoch, position (batches taken of this epoch)."""
        return {"seed": self.seed, "epoch": self.epoch, "position": self.position}

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from a saved state."""
        self.seed = int(state["seed"])
        self.epoch, self.position = int(state["epoch"]), int(state["position"])
        self._plan_epoch = None


def loader_for(
    config: DataConfig,
    store: ExampleStore,
    *,
    batch_size: int,
    seed: int,
    pad_token_id: int | None,
    stage: str = "sft",
    train: bool = True,
    pad_to_multiple_of: int = 8,
) -> Loader:
    """The loader that a configuration asks for.

    train: False for held-out examples, which are read in order, all of them.
    """
    if config.neat_packing:
        note("neat_packing: packed examples never see each other here, so packing and neat_packing are the same")
    strategy = config.train_sampling_strategy
    return Loader(
        store,
        batch_size,
        seed,
        packing=is_packed(config, stage),
        cutoff_len=config.cutoff_len,
        shuffle=train and not config.disable_shuffling and strategy != "sequential",
        pad_token_id=pad_token_id or 0,
        pad_to_multiple_of=pad_to_multiple_of,
        drop_last=train and config.dataloader_drop_last,
        group_by_length=train and (config.group_by_length or strategy == "group_by_length"),
    )


def is_packed(config: DataConfig, stage: str) -> bool:
    """Whether rows are packed: as told, else for pretraining text only."""
    if config.packing is None:
        return config.neat_packing or stage == "pt"
    return config.packing or config.neat_packing
