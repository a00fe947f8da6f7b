"""What the curves say, in plain words, and what to try: a pure function of the records.

A loss curve is noisy, so a change counts only where it is larger than chance.  The noise of the records is estimated
from their successive differences (for independent noise s, differences have variance 2 s^2; a slow trend hardly adds
to it), and the mean of n records is known to s / sqrt(n).  Two spans differ when their means are more than three
such errors and at least half a percent apart.  What cannot be told is said to be so.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any, Literal

Verdict = Literal["too few steps to say", "unstable", "overfitting", "not learning", "still falling", "flat"]
MIN_RECORDS = 8
Curve = Sequence[tuple[int, float]]


@dataclass
class Reading:
    """verdict: one of a fixed set.  lines: sentences for the person at the terminal.  advice: what to try."""

    verdict: Verdict
    lines: list[str] = field(default_factory=list)
    advice: list[str] = field(default_factory=list)


def curve(records: Sequence[dict[str, Any]], key: str) -> list[tuple[int, float]]:
    """(step, value) of every record that has `key` as a number."""
    return [(r["step"], float(r[key])) for r in records if isinstance(r.get(key), int | float)]


def noise(values: Sequence[float]) -> float:
    """Standard deviation of one record around the trend, from the median of absolute successive differences."""
    differences = sorted(abs(b - a) for a, b in itertools.pairwise(values))
    return median(differences) / (0.6745 * math.sqrt(2)) if differences else 0.0


def _fall(before: Sequence[float], after: Sequence[float], scatter: float) -> float:
    """How much lower the mean of `after` is where that is no chance; negative when higher; 0 where nobody can tell."""
    change = fmean(before) - fmean(after)
    error = scatter * math.sqrt(1 / len(before) + 1 / len(after))
    level = max(abs(fmean(before)), 1e-9)
    return change if abs(change) > max(3 * error, 0.005 * level) else 0.0


def read_curves(train: Curve, held_out: Curve = (), *, skipped: int = 0) -> Reading:
    """Read the training loss (and the held-out loss, where there is one) of a run.

    train, held_out: (step, loss) in the order of steps.  skipped: steps that were not finite.
    """
    losses = [loss for _, loss in train]
    finite = [loss for loss in losses if math.isfinite(loss)]
    shown = f"training loss {losses[0]:.3f} → {losses[-1]:.3f}" if losses else "no training loss was recorded"
    if len(held_out) >= 2:
        shown += f", held-out loss {held_out[0][1]:.3f} → {held_out[-1][1]:.3f}"
    elif held_out:
        shown += f", held-out loss {held_out[-1][1]:.3f}"
    if skipped and (skipped > 0.02 * (train[-1][0] if train else 1) or len(finite) < len(losses)):
        return Reading(
            "unstable",
            [f"{shown}; {skipped} steps were skipped because they were not finite."],
            ["lower learning_rate (a third of it)", "use bf16 instead of fp16"],
        )
    if len(finite) < MIN_RECORDS:
        return Reading(
            "too few steps to say",
            [f"{shown}; {len(finite)} records are too few to tell a trend from noise."],
            ["train longer, or set logging_steps lower to see more of a short run"],
        )
    scatter = noise(finite)
    third = max(2, len(finite) // 3)
    early, late = finite[:third], finite[-third:]
    fallen = _fall(early, late, scatter)
    lowest = min(fmean(finite[i : i + third]) for i in range(len(finite) - third + 1))
    risen = fmean(late) - lowest
    spikes = _spikes(finite, scatter)
    if fallen < 0 or risen > max(3 * scatter / math.sqrt(third), 0.03 * abs(lowest), 0.25 * (early[0] - lowest)):
        return Reading(
            "unstable",
            [f"{shown}; the training loss rises again ({lowest:.3f} at its lowest)."],
            ["lower learning_rate (a third of it)", "a longer warm-up (warmup_ratio: 0.1)"],
        )
    if spikes > max(2, 0.03 * len(finite)):
        return Reading(
            "unstable",
            [f"{shown}; {spikes} records jump far above their neighbours."],
            ["lower learning_rate", "a lower max_grad_norm (0.3)", "larger batches (gradient_accumulation_steps)"],
        )
    overfit = _overfitting(held_out, finite[0] - fmean(late))
    if overfit:
        return Reading("overfitting", [f"{shown}; {overfit}"], _against_overfitting(held_out))
    if fallen == 0 and not _held_out_fell(held_out):
        return Reading(
            "not learning",
            [f"{shown}; no fall that is larger than the noise."],
            ["a higher learning_rate (three times)", "look at what is learned: lumen data inspect"],
        )
    half = finite[len(finite) // 2 :]
    falling = _fall(half[: len(half) // 2], half[len(half) // 2 :], scatter)
    share = falling / max(finite[0] - fmean(late), 1e-9)
    if len(held_out) >= 3:
        before, last = held_out[-2][1], held_out[-1][1]
        still = (before - last) > 0.005 * abs(before)
    else:
        still = falling > 0 and share > 0.03
    if still:
        return Reading(
            "still falling",
            [f"{shown}; it was still falling at the end."],
            ["more epochs (num_train_epochs), or a somewhat higher learning_rate"],
        )
    return Reading(
        "flat",
        [f"{shown}; the curve has levelled off."],
        ["this run has given what it can: more data or a larger lora_rank before more epochs"],
    )


def _spikes(values: Sequence[float], scatter: float) -> int:
    """Records that stand far above both sides of their neighbourhood."""
    count = 0
    for i in range(2, len(values) - 2):
        around = median([*values[i - 2 : i], *values[i + 1 : i + 3]])
        count += values[i] > around + max(6 * scatter, 0.2 * abs(around))
    return count


def _overfitting(held_out: Curve, train_fall: float) -> str:
    """Why this is overfitting, or an empty text: held-out loss rises from its lowest while training loss fell."""
    if len(held_out) < 3 or train_fall <= 0:
        return ""
    step, lowest = min(held_out, key=lambda point: point[1])
    last_step, last = held_out[-1]
    if step == last_step or last - lowest < max(0.01 * abs(lowest), 0.005):
        return ""
    return f"the held-out loss was lowest ({lowest:.3f}) at step {step} and has risen since, while training went on."


def _against_overfitting(held_out: Curve) -> list[str]:
    step = min(held_out, key=lambda point: point[1])[0]
    return [
        f"stop near step {step}: load_best_model_at_end: true, or early_stopping_steps: 3",
        "fewer epochs, a smaller lora_rank, lora_dropout: 0.05, or more data",
    ]


def _held_out_fell(held_out: Curve) -> bool:
    return len(held_out) >= 2 and held_out[0][1] - min(v for _, v in held_out) > 0.005 * abs(held_out[0][1])
