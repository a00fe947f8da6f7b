"""The loss curves as a picture: training loss raw and smoothed, held-out points, learning rate below."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lumen.monitor.reading import curve

_TRAIN, _HELD, _RATE, _INK, _GRID = "#2f6fb2", "#c8501e", "#5c8a4a", "#30343a", "#e3e6ea"


def _average(values: Sequence[float], weight: float) -> list[float]:
    averages, average, norm = [], 0.0, 0.0
    for value in values:
        average = weight * average + (1 - weight) * value
        norm = weight * norm + (1 - weight)
        averages.append(average / norm)
    return averages


def smooth(values: Sequence[float], weight: float) -> list[float]:
    """Mean of the exponential averages from both ends, so the curve does not lag behind the trend.

    weight: in [0, 1), the share of what came before.
    """
    forward, backward = _average(values, weight), _average(values[::-1], weight)[::-1]
    return [(a + b) / 2 for a, b in zip(forward, backward, strict=True)]


def _limits(values: Sequence[float], curve: Sequence[float]) -> tuple[float, float]:
    """Limits that a few spikes do not blow up: to the 98th percentile, and all of the smoothed curve."""
    ordered = sorted(values)
    low = ordered[0]
    high = max(*curve, ordered[min(len(ordered) - 1, math.ceil(0.98 * (len(ordered) - 1)))])
    margin = 0.06 * (high - low) or 0.05 * max(abs(high), 1.0)
    return low - margin, high + margin


def plot_loss(records: Sequence[dict[str, Any]], path: Path, *, title: str = "", subtitle: str = "") -> bool:
    """Draw the records of a run into a PNG; False where there is nothing to draw.

    path: of the PNG.  title: of the run.  subtitle: a short second line.
    """
    train = [(s, v) for s, v in curve(records, "train/loss") if math.isfinite(v)]
    held = [(s, v) for s, v in curve(records, "eval/loss") if math.isfinite(v)]
    rates = curve(records, "train/learning_rate")
    if not train:
        return False
    os.environ.setdefault("MPLBACKEND", "Agg")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(9.0, 5.4), dpi=140, layout="constrained")
    FigureCanvasAgg(figure)
    loss_axis, rate_axis = figure.subplots(2, 1, sharex=True, height_ratios=(5, 1))
    steps, losses = [s for s, _ in train], [v for _, v in train]
    weight = min(0.85, 1 - 4 / len(train)) if len(train) > 8 else 0.0
    smoothed = smooth(losses, weight)
    if weight > 0:
        loss_axis.plot(steps, losses, color=_TRAIN, alpha=0.28, linewidth=1.0, label="training, as recorded")
        loss_axis.plot(steps, smoothed, color=_TRAIN, linewidth=2.0, label="training, smoothed")
    else:
        loss_axis.plot(steps, losses, color=_TRAIN, linewidth=1.8, marker="o", markersize=3.5, label="training")
    if held:
        loss_axis.plot(
            [s for s, _ in held], [v for _, v in held], color=_HELD, linewidth=1.4, marker="o", markersize=5.5,
            markeredgecolor="white", markeredgewidth=0.8, label="held out", zorder=5,
        )  # fmt: skip
        best_step, best = min(held, key=lambda point: point[1])
        loss_axis.annotate(
            f"{best:.3f}", (best_step, best), xytext=(0, -14), textcoords="offset points", ha="center",
            color=_HELD, fontsize=9,
        )  # fmt: skip
    loss_axis.set_ylim(*_limits(losses + [v for _, v in held], [*smoothed, *(v for _, v in held)]))
    loss_axis.set_ylabel("loss (nats per token)", color=_INK)
    loss_axis.legend(frameon=False, loc="upper right", fontsize=9)
    rate_axis.plot([s for s, _ in rates], [v for _, v in rates], color=_RATE, linewidth=1.5)
    rate_axis.set_ylabel("learning rate", color=_INK, fontsize=9)
    rate_axis.set_ylim(bottom=0)
    rate_axis.ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
    rate_axis.set_xlabel("optimizer step", color=_INK)
    rate_axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    for axis in (loss_axis, rate_axis):
        axis.grid(color=_GRID, linewidth=0.8)
        axis.set_axisbelow(True)
        axis.tick_params(colors=_INK, labelsize=9)
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
        for side in ("left", "bottom"):
            axis.spines[side].set_color("#b5bac1")
    if title:
        figure.suptitle(title, x=0.01, ha="left", fontsize=13, color=_INK, fontweight="bold")
    if subtitle:
        loss_axis.set_title(subtitle, loc="left", fontsize=10, color="#6a7078")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    return True
