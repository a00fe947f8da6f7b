"""The planner's estimate beside the memory that runs really take.

Each case trains the sample model for a few steps on rows of exactly the cut-off's length, in a process of its own, and
its peak resident memory (as the kernel counts it) stands beside the estimate of `lumen train --dry-run`.

    python -m bench.memory_estimate            # all cases, about ten minutes on 2 cores
    python -m bench.memory_estimate lora full  # cases whose name holds a word
"""

from __future__ import annotations

import json
import os
import random
import sys
import tempfile
from pathlib import Path

BASE = {
    "model_name_or_path": "smollm2",
    "bf16": True,
    "max_steps": 2,
    "per_device_train_batch_size": 2,
    "cutoff_len": 512,
    "save_strategy": "no",
    "overwrite_cache": True,
    "compile": "off",
    "plot_loss": False,
}
CASES: dict[str, dict[str, object]] = {
    "lora 2x512, recomputing": {"gradient_checkpointing": True},
    "lora 2x512": {"gradient_checkpointing": False},
    "lora 4x512": {"gradient_checkpointing": False, "per_device_train_batch_size": 4},
    "lora 1x1024": {"gradient_checkpointing": False, "per_device_train_batch_size": 1, "cutoff_len": 1024},
    "lora fp32 2x512": {"gradient_checkpointing": False, "bf16": False},
    "lora compiled 2x512": {"gradient_checkpointing": False, "compile": "on"},
    "int8 lora 2x512": {"gradient_checkpointing": False, "quant": {"recipe": "int8"}},
    "freeze 2x512": {"gradient_checkpointing": False, "finetuning_type": "freeze"},
    "full 2x512": {"gradient_checkpointing": False, "finetuning_type": "full"},
    "full pure bf16 2x512": {"gradient_checkpointing": False, "finetuning_type": "full", "pure_bf16": True},
}


def write_data(folder: Path) -> None:
    """Rows far longer than any cut-off, of common words."""
    words = ["the", "of", "and", "to", "in", "is", "that", "it", "was", "for", "on", "are", "as", "with", "they"]
    source = random.Random(0)
    rows = [{"instruction": "Write.", "output": " ".join(source.choices(words, k=3000))} for _ in range(16)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def run_case(folder: Path, settings: dict[str, object]) -> tuple[int, dict[str, int]]:
    """(peak resident bytes, estimated parts) of one case."""
    config = {**BASE, **settings, "dataset": str(folder / "rows.jsonl"), "output_dir": str(folder / "out")}
    estimated, _ = in_child(lambda: estimate_of(config), folder / "estimate.json")
    _, peak = in_child(lambda: train(config), folder / "trained.json")
    return peak, estimated


def in_child(work: object, answer: Path) -> tuple[dict[str, int], int]:
    """Run in a forked process; returns what it wrote and its peak resident bytes."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            answer.write_text(json.dumps(work()))  # type: ignore[operator]
            status = 0
        finally:
            os._exit(status)
    _, status, usage = os.wait4(child, 0)
    if status:
        sys.exit("a case failed; its message stands above")
    return json.loads(answer.read_text()), usage.ru_maxrss * 1024


def estimate_of(config: dict[str, object]) -> dict[str, int]:
    """The estimate of `lumen train --dry-run`, by part."""
    from lumen.trainer.build import build, memory_of
    from lumen.trainer.config import RunConfig

    run = build(RunConfig(**config))  # type: ignore[arg-type]
    on = run.facts["checkpointing"].on
    return dict(memory_of(run.config, run.model, run.train_loader, checkpointing=on).parts)


def train(config: dict[str, object]) -> dict[str, int]:
    """Train as `lumen train` does."""
    import lumen

    lumen.train(**{**config, "overwrite_output_dir": True})
    return {}


def main() -> None:
    wanted = [name for name in CASES if all(word in name for word in sys.argv[1:])]
    print(f"{'case':<26}{'estimate':>10}{'measured':>10}{'error':>8}   parts (MiB)")
    for name in wanted:
        with tempfile.TemporaryDirectory() as folder:
            write_data(Path(folder))
            peak, parts = run_case(Path(folder), CASES[name])
        total = sum(parts.values())
        shown = " ".join(f"{part} {size >> 20}" for part, size in parts.items())
        print(
            f"{name:<26}{total / 2**30:>9.2f}G{peak / 2**30:>9.2f}G{100 * (total / peak - 1):>+7.0f}%   {shown}",
            flush=True,
        )


if __name__ == "__main__":
    main()
