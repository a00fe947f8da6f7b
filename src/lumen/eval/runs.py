"""What a run left behind, read for comparison: its configuration, figures and curves.

A run directory holds `config.yaml` (resolved), `run.json` (parameters, device, dtype, versions), `metrics.jsonl`,
and `all_results.json` (once it ended).  A run that is still going, or was stopped, is read from its metrics and marked
so; nothing here loads a model.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from lumen.core import LumenError
from lumen.monitor.reading import Curve, curve, read_curves
from lumen.monitor.records import FILE_NAME, read_records


@dataclass
class RunSummary:
    """A run in figures; None where the run does not tell.

    method: full, freeze or lora (with its rank), qlora where the base is 4-bit.
    trainable, total: parameters.  memory: peak bytes, of the GPU where there is one, else of the process.
    seconds: of training steps, without evaluation and saving.  tokens_per_second: real tokens.
    first, final, best: held-out loss before the first step, at the end, at its lowest (best_step).
    finished: whether the run came to its end.
    """

    name: str
    path: Path
    method: str
    recipe: str
    config: dict[str, Any]
    model: str = ""
    device: str = ""
    dtype: str = ""
    trainable: int | None = None
    total: int | None = None
    memory: int | None = None
    tokens_per_second: float | None = None
    steps: int = 0
    epochs: float | None = None
    seconds: float | None = None
    train_loss: float | None = None
    first: float | None = None
    final: float | None = None
    best: float | None = None
    best_step: int | None = None
    verdict: str = ""
    finished: bool = True
    data_fingerprint: str = ""
    train_curve: Curve = field(default_factory=list)
    held_out_curve: Curve = field(default_factory=list)

    @property
    def trainable_share(self) -> float | None:
        """Trainable parameters over all, 0 to 1."""
        return None if self.trainable is None or not self.total else self.trainable / self.total


def read_run(directory: Path) -> RunSummary:
    """Read a run directory.  Raises LumenError where it is none, or one of its files is damaged."""
    if not directory.is_dir():
        raise LumenError(f"there is no run directory {directory}", where="command line", fix="check the path")
    metrics = directory / FILE_NAME
    if not metrics.is_file() or not (directory / "config.yaml").is_file():
        raise LumenError(
            f"{directory} is not a run directory: it has no {FILE_NAME if not metrics.is_file() else 'config.yaml'}",
            where="command line",
            fix="give the output_dir of a `lumen train`",
        )
    config = _mapping(directory / "config.yaml")
    facts = _mapping(directory / "run.json")
    results = _mapping(directory / "all_results.json")
    records = read_records(metrics)
    train, held = curve(records, "train/loss"), curve(records, "eval/loss")
    parameters = facts.get("parameters") or {}
    recipe = (config.get("quant") or {}).get("recipe", "bf16")
    last = max((record["step"] for record in records), default=0)
    best_step, best = min(held, key=lambda point: point[1], default=(None, None))
    skipped = int(_last(records, "train/skipped_total") or 0)
    summary = RunSummary(
        name=str(config.get("run_name") or directory.name),
        path=directory,
        method=_method(config, recipe),
        recipe=recipe,
        config=config,
        model=str(config.get("model_name_or_path") or ""),
        device=str(facts.get("device", "")),
        dtype=str(facts.get("dtype", "")),
        trainable=parameters.get("trainable"),
        total=parameters.get("total"),
        steps=int(results.get("steps", last)),
        epochs=results.get("epoch", _last(records, "epoch")),
        train_loss=train[-1][1] if train else None,
        first=held[0][1] if held and held[0][0] == 0 else None,
        final=_number(results.get("eval_loss")) if results else (held[-1][1] if held else None),
        best=best,
        best_step=best_step,
        finished=bool(results),
        data_fingerprint=str(facts.get("data_fingerprint", "")),
        train_curve=train,
        held_out_curve=held,
    )
    if train:
        summary.verdict = read_curves(train, held, skipped=skipped).verdict
    _speed(summary, results, records)
    return summary


def _speed(summary: RunSummary, results: dict[str, Any], records: list[dict[str, Any]]) -> None:
    """Memory, tokens a second and seconds: of the results, else of what was recorded so far."""
    keys = ("memory/gpu_peak_bytes", "memory/process_peak_bytes")
    memory = [results.get("peak_gpu_bytes"), results.get("peak_process_bytes"), *(_last(records, key) for key in keys)]
    if not results:
        memory = memory[2:]
    summary.memory = next((int(value) for value in memory if value), None)
    if results:
        summary.tokens_per_second = _number(results.get("tokens_per_second"))
        summary.seconds = _number(results.get("train_runtime"))
        return
    rates = [r["train/tokens_per_second"] for r in records if "train/tokens_per_second" in r]
    summary.tokens_per_second = sum(rates) / len(rates) if rates else None


def _method(config: dict[str, Any], recipe: str) -> str:
    kind = str(config.get("finetuning_type", "lora"))
    if kind == "freeze":
        layers = config.get("freeze_trainable_layers", 2)
        return f"freeze ({'last' if layers >= 0 else 'first'} {abs(layers)} layers)"
    if kind != "lora":
        return kind
    variant = "DoRA" if config.get("use_dora") else "rsLoRA" if config.get("use_rslora") else "LoRA"
    frozen = "Q" if recipe in ("nf4", "int4") else ""
    return f"{frozen}{variant} r={config.get('lora_rank', 8)}"


def _mapping(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    text = path.read_text(encoding="utf-8")
    try:
        value = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (ValueError, yaml.YAMLError) as error:
        raise LumenError(f"{path.name} is damaged: {str(error).splitlines()[0]}", where=str(path)) from None
    if not isinstance(value, dict):
        raise LumenError(f"{path.name} is damaged: it holds no keys", where=str(path))
    return value


def _last(records: list[dict[str, Any]], key: str) -> Any:
    return next((record[key] for record in reversed(records) if key in record), None)


def _number(value: Any) -> float | None:
    """A figure; text such as "nan" (JSON has none) is not one."""
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None
