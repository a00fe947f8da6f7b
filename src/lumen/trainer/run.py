"""What `build` makes and the loop trains, and what comes out at the end."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from lumen.data.loader import Loader
from lumen.optim import NamedOptimizer
from lumen.trainer.config import RunConfig


@dataclass
class Run:
    """Everything one training needs, built and in place.

    model: adapted, wrapped and on its device, in evaluation mode.  dtype: of its GEMMs.
    eval_loader: held-out batches, or None.
    data_fingerprint: of the training rows as tokens.  facts: what the run's report and the model's card tell.
    """

    config: RunConfig
    model: Any
    tokenizer: Any
    device: torch.device
    dtype: torch.dtype
    optimizer: NamedOptimizer
    train_loader: Loader
    eval_loader: Loader | None = None
    data_fingerprint: str = ""
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def output_dir(self) -> Path:
        """Folder of everything the run writes."""
        assert self.config.output_dir is not None, "config.load asks for output_dir"
        return Path(self.config.output_dir)

    @property
    def is_adapter(self) -> bool:
        """Whether the run trains a PEFT adapter (and so saves one)."""
        return hasattr(self.model, "peft_config")


@dataclass
class RunResult:
    """What `lumen.train` returns.

    metrics: of `all_results.json`: train_loss, eval_loss, eval_perplexity, tokens_per_second, peak memory, …
    best_checkpoint: of the best evaluation, where one was saved.  reading: sentences on the curves.
    exit_code: 0, or 130 / 143 when Ctrl-C / SIGTERM ended the run (everything is saved).
    """

    output_dir: Path
    steps: int
    metrics: dict[str, float]
    best_checkpoint: Path | None = None
    last_checkpoint: Path | None = None
    reading: list[str] = field(default_factory=list)
    exit_code: int = 0
