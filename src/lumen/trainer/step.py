"""One optimizer step: fetch its micro-batches, sum their losses, divide once, clip, update.

The divisor is the number of loss tokens of the *whole* step, known before the first backward because the micro-batches
are fetched first.  So every labelled token weighs the same however rows are cut into micro-batches, also in the last,
shorter step of an epoch: batch 2 x 1 equals 1 x 2.  (Averaging the means of micro-batches, as is often done, weighs a
token of a short row more.)
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from lumen.checkpoint import rng_state, set_rng_state
from lumen.data.batch import Batch
from lumen.data.loader import Loader
from lumen.objectives import LossSums
from lumen.optim import clip_factor, grad_norm, scale_grads
from lumen.quant import set_step
from lumen.trainer.guard import NOT_REPEATED, Guard, first_nonfinite_module
from lumen.trainer.run import Run
from lumen.trainer.scaler import LossScaler


@dataclass
class StepResult:
    """loss: nats per labelled token of this step.  grad_norm: before clipping.  applied: False when it was skipped."""

    loss: float
    grad_norm: float
    loss_tokens: int
    tokens: int
    num_correct: int
    applied: bool
    seconds: float


def end_of_epoch(loader: Loader) -> bool:
    """Whether the loader has given the last batch of its epoch."""
    return loader.position >= loader.batches_per_epoch(loader.epoch)


def fetch(loader: Loader, accumulation: int) -> list[Batch]:
    """The micro-batches of one optimizer step; it ends with the epoch, so an epoch's last may be shorter."""
    batches = [loader.next_batch()]
    while len(batches) < accumulation and not end_of_epoch(loader):
        batches.append(loader.next_batch())
    return batches


class Stepper:
    """Makes optimizer steps of a run.

    schedule: factor of the peak learning rates at a step.
    """

    def __init__(self, run: Run, objective: Callable[[Any, Any], LossSums], schedule: Callable[[int], float]):
        self.run = run
        self.objective = objective
        self.schedule = schedule
        self.scaler = LossScaler(enabled=run.dtype == torch.float16)
        self.guard = Guard(run.config.max_nonfinite_steps)
        self.parameters = [p for group in run.optimizer.param_groups for p in group["params"]]
        self.peak_rates = [group["lr"] for group in run.optimizer.param_groups]

    def learning_rate(self, step: int) -> float:
        """Of the first group, at a step."""
        return self.peak_rates[0] * self.schedule(step)

    def __call__(self, step: int, stop: Callable[[], bool]) -> StepResult | None:
        """Make step number `step` (0 is the first); None when `stop` became true before it was whole.

        An unfinished step leaves no trace: gradients are dropped, loader and random state are as before it.
        """
        started = time.perf_counter()
        run, loader = self.run, self.run.train_loader
        loader_before, random_before = loader.state(), rng_state()
        batches = fetch(loader, run.config.gradient_accumulation_steps)
        loss_tokens = sum(batch.num_loss_tokens for batch in batches)
        run.model.train()
        loss = torch.zeros((), dtype=torch.float32, device=run.device)
        correct = torch.zeros((), dtype=torch.int64, device=run.device)
        for micro_step, batch in enumerate(batches):
            set_step(run.model, step, micro_step)
            sums = self.objective(run.model, batch.to(run.device))
            (sums.loss_sum * (self.scaler.scale / max(loss_tokens, 1))).backward()
            loss += sums.loss_sum.detach()
            correct += sums.num_correct
            if stop() and batch is not batches[-1]:
                run.optimizer.zero_grad(set_to_none=True)
                loader.load_state(loader_before)
                set_rng_state(random_before)
                return None
        norm = grad_norm(self.parameters) / self.scaler.scale
        mean_loss, norm_value = loss.item() / max(loss_tokens, 1), norm.item()
        applied = math.isfinite(mean_loss) and math.isfinite(norm_value)
        if applied:
            self._update(step, norm_value)
        self._account(step, mean_loss, applied, batches)
        run.optimizer.zero_grad(set_to_none=True)
        return StepResult(
            mean_loss,
            norm_value,
            loss_tokens,
            sum(batch.num_tokens for batch in batches),
            int(correct.item()),
            applied,
            time.perf_counter() - started,
        )

    def _update(self, step: int, norm: float) -> None:
        factor = self.schedule(step)
        for group, peak in zip(self.run.optimizer.param_groups, self.peak_rates, strict=True):
            group["lr"] = peak * factor
        scale_grads(self.parameters, clip_factor(norm, self.run.config.max_grad_norm) / self.scaler.scale)
        self.run.optimizer.step()

    def _account(self, step: int, loss: float, applied: bool, batches: list[Batch]) -> None:
        """Scaler and guard: an overflow that the loss scale explains is no fault; anything else is named."""
        explained = self.scaler.update(applied)
        if applied:
            self.guard.good()
        elif not (explained and math.isfinite(loss)):
            self.run.optimizer.zero_grad(set_to_none=True)
            what = "gradient" if math.isfinite(loss) else "loss"
            self.guard.bad(step + 1, what, self._find(batches))

    def _find(self, batches: list[Batch]) -> str:
        where = ""
        for batch in batches:
            on_device = batch.to(self.run.device)
            where = first_nonfinite_module(
                self.run.model,
                lambda one=on_device: self.objective(self.run.model, one).loss_sum * self.scaler.scale,  # type: ignore[misc]
            )
            if where != NOT_REPEATED:
                break
        return where
