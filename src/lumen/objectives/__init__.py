"""Losses, and how loss tokens are counted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lumen.core.errors import ConfigError
from lumen.objectives.sft import LossSums, loss_sum

_OBJECTIVES: dict[str, Callable[[Any, Any], LossSums]] = {"sft": loss_sum, "pt": loss_sum}

__all__ = ["LossSums", "loss_sum", "objective"]


def objective(stage: str) -> Callable[[Any, Any], LossSums]:
    """The loss of a stage: a function of (model, batch).  Raises ConfigError for a stage that is not built."""
    if stage not in _OBJECTIVES:
        raise ConfigError(f"stage {stage!r} is not built", where="stage", fix=f"use one of {', '.join(_OBJECTIVES)}")
    return _OBJECTIVES[stage]
