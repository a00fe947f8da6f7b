"""How many steps a run has, and at which of them it logs, evaluates and saves."""

from __future__ import annotations

import math
from dataclasses import dataclass

from lumen.data.loader import Loader
from lumen.trainer.config import RunConfig


def steps_of_epoch(loader: Loader, epoch: int, accumulation: int) -> int:
    """Optimizer steps of an epoch; the last may have fewer micro-batches."""
    return math.ceil(loader.batches_per_epoch(epoch) / accumulation)


def total_steps(config: RunConfig, loader: Loader) -> int:
    """Optimizer steps of the run: max_steps, or num_train_epochs passes over the data (fractions rounded up)."""
    if config.max_steps > 0:
        return config.max_steps
    accumulation = config.gradient_accumulation_steps
    whole = int(config.num_train_epochs)
    steps = sum(steps_of_epoch(loader, epoch, accumulation) for epoch in range(whole))
    if config.num_train_epochs > whole:
        steps += math.ceil((config.num_train_epochs - whole) * steps_of_epoch(loader, whole, accumulation))
    return max(1, steps)


def every(interval: float, total: int) -> int:
    """A number of steps, or below 1 a share of all steps."""
    return max(1, math.ceil(total * interval) if interval < 1 else int(interval))


@dataclass(frozen=True)
class Cadence:
    """What happens after a step.  Steps count from 1 here: `step` have been made."""

    config: RunConfig
    total: int

    def logs(self, step: int) -> bool:
        """Whether to write a training record."""
        first = self.config.logging_first_step and step == 1
        return first or step % max(1, self.config.logging_steps) == 0 or step == self.total

    def evaluates(self, step: int, epoch_ended: bool) -> bool:
        """Whether to evaluate in between (the end of the run always evaluates)."""
        if self.config.eval_strategy == "steps":
            return step % every(self.config.eval_steps or self.config.logging_steps, self.total) == 0
        return self.config.eval_strategy == "epoch" and epoch_ended

    def saves(self, step: int, epoch_ended: bool) -> bool:
        """Whether to save in between."""
        if self.config.save_strategy == "steps":
            return step % every(self.config.save_steps, self.total) == 0
        return self.config.save_strategy == "epoch" and epoch_ended
