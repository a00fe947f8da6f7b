"""The learning rate as a function of the step, and of nothing else: no state to save.

HF's names and formulas (`transformers.get_scheduler`), so a file from elsewhere gives the same curve; tested against
them. The factor multiplies the peak learning rate; step 0 is the first update.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from lumen.core.errors import ConfigError

Schedule = Callable[[int], float]


def warmup_steps(total: int, *, warmup_steps: float = 0, warmup_ratio: float = 0.0) -> int:
    """Steps of warm-up: a number, or a share of all steps (a `warmup_steps` below 1, or `warmup_ratio`).

    A `warmup_steps` above 0 wins over the ratio, as in transformers.
    """
    if warmup_steps >= 1:
        return int(warmup_steps)
    share = warmup_steps if warmup_steps > 0 else warmup_ratio
    return math.ceil(total * share)


def _linear(x: float, *, lr: float) -> float:
    return max(0.0, 1.0 - x)


def _cosine(x: float, *, lr: float, num_cycles: float = 0.5) -> float:
    return max(0.0, 0.5 * (1.0 + math.cos(math.pi * num_cycles * 2.0 * x)))


def _cosine_with_restarts(x: float, *, lr: float, num_cycles: float = 1) -> float:
    return 0.0 if x >= 1.0 else max(0.0, 0.5 * (1.0 + math.cos(math.pi * ((num_cycles * x) % 1.0))))


def _floor_of(min_lr: float | None, min_lr_rate: float | None, lr: float) -> float:
    if min_lr is not None and min_lr_rate is not None:
        raise ConfigError("min_lr and min_lr_rate are both given", where="lr_scheduler_kwargs", fix="keep one of them")
    if min_lr is None and min_lr_rate is None:
        raise ConfigError(
            "lr_scheduler_type: cosine_with_min_lr needs the lowest learning rate",
            where="lr_scheduler_kwargs",
            fix="add lr_scheduler_kwargs: {min_lr_rate: 0.1}",
        )
    return min_lr / lr if min_lr is not None else float(min_lr_rate or 0.0)


def _cosine_with_min_lr(
    x: float, *, lr: float, min_lr: float | None = None, min_lr_rate: float | None = None, num_cycles: float = 0.5
) -> float:
    floor = _floor_of(min_lr, min_lr_rate, lr)
    return max(0.0, 0.5 * (1.0 + math.cos(math.pi * num_cycles * 2.0 * x)) * (1 - floor) + floor)


def _polynomial(x: float, *, lr: float, lr_end: float = 1e-7, power: float = 1.0) -> float:
    return lr_end / lr if x > 1.0 else ((lr - lr_end) * (1 - x) ** power + lr_end) / lr


_DECAYS: dict[str, Callable[..., float]] = {
    "linear": _linear,
    "cosine": _cosine,
    "cosine_with_restarts": _cosine_with_restarts,
    "cosine_with_min_lr": _cosine_with_min_lr,
    "polynomial": _polynomial,
    "constant": lambda x, lr: 1.0,
    "constant_with_warmup": lambda x, lr: 1.0,
}
NAMES = (*_DECAYS, "inverse_sqrt")


def make_schedule(name: str, *, total: int, warmup: int, lr: float, options: dict[str, Any] | None = None) -> Schedule:
    """The factor by which the learning rate is multiplied at a step.

    name: HF's `lr_scheduler_type`.  total, warmup: optimizer steps.  lr: the peak, for schedules with a floor.
    options: `lr_scheduler_kwargs` (num_cycles, power, lr_end, min_lr, min_lr_rate, timescale).
    Raises ConfigError for names and options that do not exist.
    """
    options = dict(options or {})
    lr = lr or 1.0  # a peak of 0 stays 0 whatever the factor is
    if name == "inverse_sqrt":
        timescale = options.pop("timescale", None) or warmup or 10_000
        shift = timescale - warmup
        decay = lambda step: 1.0 / math.sqrt((step + shift) / timescale)  # noqa: E731
    elif name in _DECAYS:
        shape = _DECAYS[name]
        span = max(1, total - warmup)
        decay = lambda step: shape((step - warmup) / span, lr=lr, **options)  # noqa: E731
    else:
        raise ConfigError(
            f"lr_scheduler_type {name!r} is not built", where="lr_scheduler_type", fix=f"use one of {', '.join(NAMES)}"
        )
    if name == "constant":
        warmup = 0

    def factor(step: int) -> float:
        return step / max(1, warmup) if step < warmup else decay(step)

    try:
        factor(total)
        factor(warmup)
    except TypeError as error:
        raise ConfigError(
            f"lr_scheduler_type {name} does not take these options: {sorted(options)}", where="lr_scheduler_kwargs"
        ) from error
    return factor
