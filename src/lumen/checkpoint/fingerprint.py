"""What must be the same for a run to continue, and how a difference is told.

Three kinds of keys.  *Position* keys (batch size, accumulation, seed, data, cutoff, packing …) give the loader's
position its meaning: where one differs, continuing would repeat some rows and leave others out, so it is refused by
name.  *Free* keys (paths, logging, how often to save) change nothing.  Every other difference is printed and accepted:
training on with another learning rate is a choice.
"""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from lumen.core.errors import CheckpointError
from lumen.core.files import sha256_json
from lumen.core.log import say

POSITION_KEYS = (
    "per_device_train_batch_size", "gradient_accumulation_steps", "seed", "data_seed", "dataset", "cutoff_len",
    "packing", "neat_packing", "max_samples", "val_size", "template", "train_on_prompt", "mask_history", "stage",
    "mix_strategy", "interleave_probs", "disable_shuffling", "train_sampling_strategy", "dataloader_drop_last",
)  # fmt: skip
"""Keys that decide which rows are at a position, in which order, cut how."""

FREE_KEYS = frozenset([
    "output_dir", "logging_dir", "logging_steps", "logging_strategy", "logging_first_step", "save_steps",
    "save_strategy", "save_total_limit", "save_only_model", "eval_steps", "eval_strategy", "eval_on_start",
    "eval_delay", "report_to", "run_name", "plot_loss", "monitor", "overwrite_output_dir", "resume_from_checkpoint",
    "disable_tqdm", "log_level", "overwrite_cache", "preprocessing_num_workers", "dataloader_num_workers",
    "ddp_timeout", "do_train", "do_eval", "monitor", "include_num_input_tokens_seen",
])  # fmt: skip


def versions() -> dict[str, str]:
    """Versions of what the numbers depend on."""
    found = {"python": platform.python_version()}
    for name in ("lumen-train", "torch", "transformers", "peft", "safetensors", "numpy"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def position_values(config: dict[str, Any], *, world_size: int = 1) -> dict[str, Any]:
    """The position keys of a resolved config, with the number of processes."""
    values = {key: config[key] for key in POSITION_KEYS if key in config}
    values["world_size"] = world_size
    return values


def config_fingerprint(config: dict[str, Any]) -> str:
    """Digest of everything in the config that may change the result."""
    return sha256_json({key: value for key, value in config.items() if key not in FREE_KEYS})


def differences(old: dict[str, Any], new: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Keys with other values: key → (old, new).  Keys that only one side knows compare with None."""
    keys = [*old, *(key for key in new if key not in old)]
    return {key: (old.get(key), new.get(key)) for key in keys if old.get(key) != new.get(key)}


def check_resumable(
    *,
    directory: str,
    old_config: dict[str, Any],
    new_config: dict[str, Any],
    old_positions: dict[str, Any],
    new_positions: dict[str, Any],
    old_data: str,
    new_data: str,
    old_versions: dict[str, str],
) -> list[str]:
    """Print what differs between the checkpoint and this run; returns the lines.

    Raises CheckpointError naming every position key that differs, or the data when its contents changed.
    """
    moved = differences(old_positions, new_positions)
    if moved:
        listed = "; ".join(f"{key} was {old!r}, is {new!r}" for key, (old, new) in moved.items())
        raise CheckpointError(
            f"this run cannot continue {directory}: {listed}. The position in the data would mean other rows",
            where=", ".join(moved),
            fix="give the old values back, or start anew with overwrite_output_dir: true or another output_dir",
        )
    if old_data and new_data and old_data != new_data:
        raise CheckpointError(
            f"this run cannot continue {directory}: the contents of the training data changed since it was saved",
            where="dataset",
            fix="restore the data file, or start anew with overwrite_output_dir: true or another output_dir",
        )
    lines = []
    for key, (old, new) in differences(old_config, new_config).items():
        if key not in FREE_KEYS:
            lines.append(f"resuming with {key}: {new!r} (the checkpoint was trained with {old!r})")
    for name, (old, new) in differences(old_versions, versions()).items():
        lines.append(f"resuming with {name} {new} (the checkpoint was written with {old}); results may differ slightly")
    for line in lines:
        say(line)
    return lines
