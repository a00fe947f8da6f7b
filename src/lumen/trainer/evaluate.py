"""Held-out loss, reduced batch by batch: three numbers are kept, logits never."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lumen.data.batch import Batch
from lumen.objectives import LossSums


@dataclass
class HeldOut:
    """loss: nats per labelled token, over all of them (not a mean of batch means).  accuracy: of greedy next tokens."""

    loss: float
    accuracy: float
    tokens: int
    seconds: float

    @property
    def perplexity(self) -> float:
        """exp(loss); infinity where that overflows."""
        return math.exp(self.loss) if self.loss < 700 else math.inf

    def metrics(self) -> dict[str, float]:
        """Metrics of a record."""
        return {
            "eval/loss": self.loss, "eval/perplexity": self.perplexity, "eval/accuracy": self.accuracy,
            "eval/tokens": self.tokens, "eval/seconds": round(self.seconds, 3),
        }  # fmt: skip


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Dropout off inside the block; every module's mode as before after it."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


@torch.no_grad()
def held_out_loss(
    model: nn.Module,
    batches: Iterable[Batch],
    objective: Callable[[Any, Any], LossSums],
    device: torch.device,
    *,
    stop: Callable[[], bool] = lambda: False,
) -> HeldOut | None:
    """The held-out loss of a model; None when `stop` became true before all batches were seen."""
    started = time.perf_counter()
    loss = torch.zeros((), dtype=torch.float64, device=device)
    correct = torch.zeros((), dtype=torch.int64, device=device)
    tokens = 0
    with evaluation_mode(model):
        for batch in batches:
            if stop():
                return None
            sums = objective(model, batch.to(device))
            loss += sums.loss_sum.double()
            correct += sums.num_correct
            tokens += sums.num_loss_tokens
    divisor = max(tokens, 1)
    return HeldOut(loss.item() / divisor, correct.item() / divisor, tokens, time.perf_counter() - started)
