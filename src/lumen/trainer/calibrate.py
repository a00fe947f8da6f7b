"""Before the first step: measure what some recipes must know of the layers' inputs (quant.smooth).

The measurement is made in high precision on the first micro-batches of the training data; a resumed run takes it from
its checkpoint, so that it goes on with the very factors it began with.
"""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from lumen.checkpoint.state import SCALING_FILE
from lumen.data.loader import Loader
from lumen.models.attention import model_inputs
from lumen.quant import smooth
from lumen.trainer.config import RunConfig


def calibrate(
    model: Any, config: RunConfig, loader: Loader, device: torch.device, checkpoint: Path | None = None
) -> bool:
    """Give every layer that waits for its smoothing factors what it needs; returns whether there was one.

    loader: is read without moving its position.  checkpoint: what the run goes on from.
    """
    if not smooth.waiting(model):
        return False
    saved = checkpoint / SCALING_FILE if checkpoint else None
    if saved is not None and saved.is_file():
        smooth.restore(model, load_file(saved))
    if smooth.waiting(model):
        batches = islice(loader.one_pass(), config.quant.smooth.batches)
        smooth.calibrate(model, batches, lambda batch: model(**model_inputs(batch.to(device), model)))
    return True
