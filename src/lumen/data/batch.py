"""A batch: token ids, what is learned of them, and which example each token belongs to.

Rows are padded on the right.  What is padding is said by `segment_ids` (0), never by comparing with a token id, so a
tokenizer whose padding token is its end token loses nothing.  `labels` are not shifted: the objective predicts
`labels[i + 1]` from position *i*, and the first token of every segment carries -100, so no segment predicts the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from lumen.data.examples import IGNORE, Example


@dataclass
class Batch:
    """One micro-batch of shape [B, T].

    input_ids:       int64 [B, T].
    labels:          int64 [B, T]; the token's id where it is learned, -100 elsewhere; not shifted.
    position_ids:    int64 [B, T]; restart at 0 with each segment.
    segment_ids:     int32 [B, T]; 0 where padded, 1…n for the examples that share a row.
    packed:          whether any row holds more than one example.
    num_loss_tokens: labels that are not -100.
    num_tokens:      tokens that are not padding.
    """

    input_ids: torch.Tensor
    labels: torch.Tensor
    position_ids: torch.Tensor
    segment_ids: torch.Tensor
    packed: bool
    num_loss_tokens: int
    num_tokens: int

    def to(self, device: str | torch.device, *, non_blocking: bool = False) -> Batch:
        """The same batch with its tensors on `device`."""
        return replace(
            self,
            input_ids=self.input_ids.to(device, non_blocking=non_blocking),
            labels=self.labels.to(device, non_blocking=non_blocking),
            position_ids=self.position_ids.to(device, non_blocking=non_blocking),
            segment_ids=self.segment_ids.to(device, non_blocking=non_blocking),
        )


def collate(
    rows: Sequence[Sequence[Example]], *, pad_token_id: int, pad_to_multiple_of: int = 1, pad_to: int = 0
) -> Batch:
    """Make a `Batch` of rows, each a list of the examples that share it.

    pad_token_id:       what fills `input_ids` where there is nothing; any id does.
    pad_to_multiple_of: T is rounded up to a multiple of this.
    pad_to:             T is at least this (0: as long as the longest row).
    """
    longest = max(sum(len(example.input_ids) for example in row) for row in rows)
    length = max(longest, pad_to)
    length = -(-length // pad_to_multiple_of) * pad_to_multiple_of
    shape = (len(rows), length)
    input_ids = np.full(shape, pad_token_id, np.int64)
    labels = np.full(shape, IGNORE, np.int64)
    position_ids = np.zeros(shape, np.int64)
    segment_ids = np.zeros(shape, np.int32)
    for b, row in enumerate(rows):
        start = 0
        for number, example in enumerate(row, 1):
            stop = start + len(example.input_ids)
            input_ids[b, start:stop] = example.input_ids
            labels[b, start:stop] = example.labels
            labels[b, start] = IGNORE
            position_ids[b, start:stop] = np.arange(stop - start)
            segment_ids[b, start:stop] = number
            start = stop
    return Batch(
        input_ids=torch.from_numpy(input_ids),
        labels=torch.from_numpy(labels),
        position_ids=torch.from_numpy(position_ids),
        segment_ids=torch.from_numpy(segment_ids),
        packed=any(len(row) > 1 for row in rows),
        num_loss_tokens=int((labels != IGNORE).sum()),
        num_tokens=int((segment_ids != 0).sum()),
    )
