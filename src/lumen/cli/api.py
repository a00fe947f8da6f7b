"""`lumen.train`: what the command line calls, for Python."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lumen.config import LoadedConfig, dump, load
from lumen.core.log import forget_notes, note
from lumen.trainer.run import RunResult

NEEDS = ("model_name_or_path", "dataset", "output_dir")


def resolved_yaml(loaded: LoadedConfig) -> str:
    """The resolved configuration as YAML; loads back to an equal one."""
    import yaml

    return yaml.safe_dump(dump(loaded.run), sort_keys=False, allow_unicode=True)


def load_for_training(
    path: str | Path | None, words: Sequence[str] = (), values: dict[str, Any] | None = None
) -> LoadedConfig:
    """Load a configuration for a new run and say what was noted about it."""
    forget_notes()
    loaded = load(path, words, values=values, needs=NEEDS)
    for line in loaded.notes:
        note(line)
    return loaded


def train(path: str | Path | None = None, **overrides: Any) -> RunResult:
    """Train from a configuration file, with typed overrides: `lumen.train("run.yaml", learning_rate=2e-4)`.

    path: a YAML or JSON file, or None where the overrides say everything.
    Raises LumenError for mistakes in configuration, data, model or checkpoint.
    """
    from lumen.trainer.train import run_training

    loaded = load_for_training(path, values=overrides)
    return run_training(loaded.run, resolved=resolved_yaml(loaded))
