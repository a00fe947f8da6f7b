"""The loss curves of several runs in one picture."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path

from lumen.eval.compare import names
from lumen.eval.runs import RunSummary
from lumen.monitor.plot import smooth

COLOURS = ("#2f6fb2", "#c8501e", "#5c8a4a", "#8a5ca8", "#b08a1e", "#2f9aa0", "#a83a5c", "#6a7078")
_INK, _GRID = "#30343a", "#e3e6ea"


def overlay(runs: Sequence[RunSummary], path: Path) -> bool:
    """Draw training loss (thin, smoothed) and held-out loss (points) of each run into a PNG.

    Steps are shown as a share of each run's own where the runs differ in length by more than twice.
    Returns False where no run has a curve.
    """
    if not any(run.train_curve or run.held_out_curve for run in runs):
        return False
    os.environ.setdefault("MPLBACKEND", "Agg")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    lengths = [max(run.steps, 1) for run in runs]
    shared = max(lengths) <= 2 * min(lengths)
    figure = Figure(figsize=(9.0, 5.0), dpi=140, layout="constrained")
    FigureCanvasAgg(figure)
    axis = figure.subplots()
    for i, (run, name, length) in enumerate(zip(runs, names(runs), lengths, strict=True)):
        colour, scale = COLOURS[i % len(COLOURS)], 1.0 if shared else 100.0 / length
        train = [(step * scale, loss) for step, loss in run.train_curve if math.isfinite(loss)]
        held = [(step * scale, loss) for step, loss in run.held_out_curve if math.isfinite(loss)]
        if train:
            losses = [loss for _, loss in train]
            weight = min(0.9, 1 - 4 / len(train)) if len(train) > 8 else 0.0
            axis.plot([x for x, _ in train], smooth(losses, weight), color=colour, linewidth=1.2, alpha=0.45)
        label = f"{name} · {run.method} · {run.recipe}"
        axis.plot(
            [x for x, _ in held], [loss for _, loss in held], color=colour, linewidth=1.8, marker="o", markersize=5,
            markeredgecolor="white", markeredgewidth=0.8, label=label, zorder=5,
        )  # fmt: skip
    axis.set_xlabel("optimizer step" if shared else "share of the run (%)", color=_INK)
    axis.set_ylabel("loss (nats per token)", color=_INK)
    axis.set_title("held-out loss (points) and training loss (thin)", loc="left", fontsize=10, color="#6a7078")
    axis.grid(color=_GRID, linewidth=0.8)
    axis.set_axisbelow(True)
    axis.legend(frameon=False, fontsize=9)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    return True
