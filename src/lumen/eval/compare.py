"""Runs side by side: what each cost, what it reached, and what was set differently.

A comparison is worth what it holds equal.  Where the runs were measured on different held-out rows, or trained on
different data, that is said above the table; and the settings that differ are listed, so that no figure is put down
to the method when it was the learning rate.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from lumen.eval.runs import RunSummary
from lumen.monitor.memory import readable_bytes

HELD_OUT_KEYS = ("dataset_dir", "eval_dataset", "val_size", "cutoff_len", "template", "max_samples")
"""Settings that decide what held-out loss is measured on."""

_OWN_KEYS = {"output_dir", "run_name", "logging_dir", "overwrite_output_dir", "resume_from_checkpoint", "plot_loss",
             "logging_steps", "save_steps", "save_strategy", "save_total_limit", "overwrite_cache", "report_to",
             "disable_tqdm", "finetuning_type"}  # fmt: skip
"""Settings that differ between any two runs or have a column of their own."""


def _or_dash(value: Any, form: Callable[[Any], str]) -> str:
    return "–" if value is None else form(value)


def duration(seconds: float) -> str:
    """`48 s`, `3 min 20 s`, `2 h 05 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{seconds:.0f} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


COLUMNS: tuple[tuple[str, Callable[[RunSummary], str]], ...] = (
    ("method", lambda run: run.method),
    ("recipe", lambda run: run.recipe),
    ("trainable", lambda run: _or_dash(run.trainable, lambda n: f"{n:,}")),
    ("trainable %", lambda run: _or_dash(run.trainable_share, lambda share: f"{share:.2%}")),
    ("peak memory", lambda run: _or_dash(run.memory, readable_bytes)),
    ("tokens/s", lambda run: _or_dash(run.tokens_per_second, lambda rate: f"{rate:,.0f}")),
    ("steps", lambda run: f"{run.steps:,}" + ("" if run.finished else " (not ended)")),
    ("training time", lambda run: _or_dash(run.seconds, duration)),
    ("training loss, last", lambda run: _or_dash(run.train_loss, lambda loss: f"{loss:.4f}")),
    ("held-out loss before", lambda run: _or_dash(run.first, lambda loss: f"{loss:.4f}")),
    ("held-out loss, final", lambda run: _or_dash(run.final, lambda loss: f"{loss:.4f}")),
    ("held-out loss, best", lambda run: _or_dash(run.best, lambda loss: f"{loss:.4f} (step {run.best_step})")),
    ("curves", lambda run: run.verdict or "–"),
)
"""Name of a figure → how a run's is written.  The table has one column for each run, so that it stays narrow."""


def names(runs: Sequence[RunSummary]) -> list[str]:
    """A name for each run: its own, or its path where two share one."""
    own = [run.name for run in runs]
    return own if len(set(own)) == len(own) else [str(run.path) for run in runs]


def table(runs: Sequence[RunSummary]) -> list[list[str]]:
    """Header row, then one row for each figure: [figure, run 1, run 2, …]."""
    return [["", *names(runs)], *([name, *map(write, runs)] for name, write in COLUMNS)]


def differences(runs: Sequence[RunSummary]) -> list[list[str]]:
    """[setting, run 1, run 2, …] for every setting that is not the same in all runs."""
    flat = [_flat(run.config) for run in runs]
    keys = list(dict.fromkeys(key for values in flat for key in values))
    rows = []
    for key in keys:
        values = [values.get(key) for values in flat]
        if key.split(".")[0] not in _OWN_KEYS and any(value != values[0] for value in values):
            rows.append([key, *(_text(value) for value in values)])
    return rows


def cautions(runs: Sequence[RunSummary]) -> list[str]:
    """Sentences on why figures of these runs may not be set against each other."""
    said = []
    if len({_measured_on(run) for run in runs}) > 1:
        said.append("the held-out losses are of different rows or cutoffs: do not compare them")
    if len({run.data_fingerprint for run in runs}) > 1:
        said.append("the runs were trained on different rows or with different templates")
    if len({(run.device.split(":")[0], run.dtype) for run in runs}) > 1:
        said.append("the runs differ in device or dtype: compare speed and memory with that in mind")
    said += [
        f"{name} did not come to its end; its figures are those so far"
        for name, run in zip(names(runs), runs, strict=True)
        if not run.finished
    ]
    return said


def _measured_on(run: RunSummary) -> str:
    config = run.config
    wanted = {key: config.get(key) for key in HELD_OUT_KEYS}
    if config.get("val_size"):
        wanted |= {"dataset": config.get("dataset"), "seed": config.get("seed")}
    return json.dumps([run.model, wanted], sort_keys=True, default=str)


def as_json(runs: Sequence[RunSummary]) -> dict[str, Any]:
    """Everything, for a machine to read."""
    rows = []
    for name, run in zip(names(runs), runs, strict=True):
        rows.append(
            {
                "name": name, "path": str(run.path), "model": run.model, "method": run.method, "recipe": run.recipe,
                "device": run.device, "dtype": run.dtype, "trainable_parameters": run.trainable,
                "total_parameters": run.total, "trainable_share": run.trainable_share,
                "peak_memory_bytes": run.memory, "tokens_per_second": run.tokens_per_second, "steps": run.steps,
                "epochs": run.epochs, "train_seconds": run.seconds, "train_loss": run.train_loss,
                "eval_loss_before": run.first, "eval_loss": run.final, "best_eval_loss": run.best,
                "best_step": run.best_step, "verdict": run.verdict, "finished": run.finished,
                "train_curve": run.train_curve, "eval_curve": run.held_out_curve,
            }
        )  # fmt: skip
    settings = {key: dict(zip(names(runs), values, strict=True)) for key, *values in differences(runs)}
    return {"runs": rows, "differences": settings, "cautions": cautions(runs)}


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    head, *body = rows
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in body]
    return "\n".join(lines)


def _flat(values: dict[str, Any], before: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        name = f"{before}{key}"
        if isinstance(value, dict):
            flat |= _flat(value, f"{name}.")
        else:
            flat[name] = value
    return flat


def _text(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "–"
    return "–" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
