"""A tiny run: a model directory, a data file and a RunConfig, ready for `run_training`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.helpers.tiny import save_tiny


def write_rows(path: Path, count: int = 40, *, start: int = 0) -> Path:
    """Alpaca rows of different lengths, one JSON object a line."""
    rows = []
    for i in range(start, start + count):
        words = " ".join(str((i * 7 + k * 3) % 10) for k in range(3 + i * 5 % 23))
        rows.append({"instruction": f"count from {i}", "output": words})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def run_values(folder: Path, **overrides: Any) -> dict[str, Any]:
    """Flat configuration values of a tiny LoRA run in `folder`; makes the model and the rows where they are missing.

    Dropout 0.1, batch 2 × accumulation 4, 38 rows: 19 micro-batches, 5 steps an epoch, the last one shorter.
    """
    model = folder / "model"
    if not model.exists():
        save_tiny(model)
    rows = folder / "rows.jsonl"
    if not rows.exists():
        write_rows(rows, 38)
    return {
        "model_name_or_path": str(model),
        "dataset": [str(rows)],
        "output_dir": str(folder / "out"),
        "tokenized_path": str(folder / "cache"),
        "finetuning_type": "lora",
        "lora_dropout": 0.1,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 4,
        "learning_rate": 1e-2,
        "num_train_epochs": 2,
        "lr_scheduler_type": "cosine",
        "warmup_ratio": 0.1,
        "logging_steps": 1,
        "save_steps": 3,
        "seed": 7,
        "device": "cpu",
        "compile": "off",
        "plot_loss": False,
        "disable_gradient_checkpointing": True,
        **overrides,
    }


def run_config(folder: Path, **overrides: Any) -> Any:
    """`run_values` as a RunConfig."""
    from lumen.trainer.config import RunConfig

    return RunConfig(**run_values(folder, **overrides))
