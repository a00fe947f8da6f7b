"""The progress bar: loss, learning rate, real tokens a second, memory, time left.

Where standard error is no terminal (a file, a job's log) a line is printed at every record instead, so that a log shows
the same numbers without control characters.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from lumen.core.log import console, say
from lumen.monitor.memory import process_bytes, readable_bytes


class ProgressBar:
    """A bar over optimizer steps.

    total: steps of the run.  start: steps already made (resume).  enabled: None shows the bar on a terminal.
    """

    def __init__(self, total: int, *, start: int = 0, enabled: bool | None = None, device: torch.device | None = None):
        self.enabled = console.is_terminal if enabled is None else enabled
        self.total = total
        self.device = device
        self._status = ""
        self._progress = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[status]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(elapsed_when_finished=False),
            console=console,
            disable=not self.enabled,
            transient=False,
        )
        self._task = self._progress.add_task("train", total=total, completed=start, status="")

    def __enter__(self) -> ProgressBar:
        if self.enabled:
            self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.enabled:
            self._progress.stop()

    def step(self, step: int, *, loss: float, tokens_per_second: float) -> None:
        """Move to a step."""
        if self.enabled:
            status = f"loss {loss:.4f}  {tokens_per_second:,.0f} tokens/s  {readable_bytes(self._memory())}"
            self._progress.update(self._task, completed=step, status=status)

    def record(self, record: dict[str, Any]) -> None:
        """A record was written: a line of the log where there is no bar, and evaluations always."""
        line = describe(record, self.total)
        if line and (not self.enabled or "eval/loss" in record):
            say(line)

    def _memory(self) -> int:
        if self.device is not None and self.device.type == "cuda":
            return torch.cuda.memory_reserved(self.device)
        return process_bytes()


def describe(record: dict[str, Any], total: int) -> str:
    """One line of a record for the log; empty for records that are no metrics."""
    head = f"step {record['step']}/{total}"
    if "eval/loss" in record:
        return (
            f"{head}  held-out loss {record['eval/loss']:.4f}  perplexity {record['eval/perplexity']:.2f}  "
            f"token accuracy {record['eval/accuracy']:.1%}"
        )
    if "train/loss" in record:
        return (
            f"{head}  loss {record['train/loss']:.4f}  grad norm {record['train/grad_norm']:.3f}  "
            f"lr {record['train/learning_rate']:.2e}  {record['train/tokens_per_second']:,.0f} tokens/s  "
            f"{readable_bytes(record['memory/process_bytes'])}"
        )
    return ""
