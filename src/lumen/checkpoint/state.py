"""What a run is: everything that the next step depends on, as safetensors and JSON.

    trainer_state.json      step, loader position, tokens, schedule, loss scale, best result, fingerprints, versions
    trainable.safetensors   trainable parameters by their names in the model (those without an fp32 master)
    optimizer.safetensors   exp_avg/NAME, exp_avg_sq/NAME, master/NAME
    rng.safetensors         random generators
    scaling.safetensors     amax histories of delayed scales, smoothing factors, where the model has any
    adapter_* or model.*    the same weights in the layout that PEFT and transformers load

The weights lie twice where that is cheap (LoRA) because the two readers ask for different things: resuming wants every
parameter under its own name to the last bit; others want a directory that loads.  A trainable 16-bit weight with an
fp32 master is not repeated: it is the rounding of its master.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from lumen.checkpoint.rng import rng_state
from lumen.core.errors import CheckpointError
from lumen.core.files import atomic_write_json
from lumen.optim import NamedOptimizer
from lumen.quant.scaling import histories, load_histories
from lumen.quant.smooth import smoothings

STATE_FILE = "trainer_state.json"
STATE_VERSION = 1
SCALING_FILE = "scaling.safetensors"


@dataclass
class TrainState:
    """The numbers of a run that change; all plain JSON.

    step: optimizer steps made; skipped ones count.  epoch: passes over the data, fractional.
    loader: the loader's three integers.  tokens: real (not padded) tokens seen; loss_tokens: those with a label.
    """

    step: int = 0
    epoch: float = 0.0
    loader: dict[str, int] = field(default_factory=dict)
    tokens: int = 0
    loss_tokens: int = 0
    train_seconds: float = 0.0
    optimizer_steps: int = 0
    scaler: dict[str, float] = field(default_factory=dict)
    guard: dict[str, int] = field(default_factory=dict)
    best_metric: float | None = None
    best_step: int | None = None
    evals_without_improvement: int = 0
    last_eval_step: int = -1
    total_loss: float = 0.0
    total_loss_steps: int = 0
    window: dict[str, Any] = field(default_factory=dict)
    """Sums of the training record that was being collected."""
    positions: dict[str, Any] = field(default_factory=dict)
    """Config keys that fix the meaning of the loader's position."""
    config: dict[str, Any] = field(default_factory=dict)
    config_fingerprint: str = ""
    data_fingerprint: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    version: int = STATE_VERSION


def save_state(directory: Path, state: TrainState, model: nn.Module, optimizer: NamedOptimizer) -> None:
    """Write everything but the loadable weights into `directory` (which the store commits)."""
    optimizer_state = optimizer.named_state()
    masters = {name.removeprefix("master/") for name in optimizer_state if name.startswith("master/")}
    trainable = {n: p for n, p in model.named_parameters() if p.requires_grad and n not in masters}
    _save_tensors(directory / "trainable.safetensors", trainable)
    _save_tensors(directory / "optimizer.safetensors", optimizer_state)
    _save_tensors(directory / "rng.safetensors", rng_state())
    if seen := {**histories(model), **smoothings(model)}:
        _save_tensors(directory / SCALING_FILE, seen)
    atomic_write_json(directory / STATE_FILE, asdict(state))


def read_state(directory: Path) -> TrainState:
    """The numbers of a checkpoint.

    Raises CheckpointError where the directory holds only a model (`save_only_model`) or a newer layout.
    """
    path = directory / STATE_FILE
    if not path.is_file():
        raise CheckpointError(
            f"{directory.name} holds no training state (it was saved with save_only_model, or by another tool)",
            where=str(directory),
            fix="start a new run from it with adapter_name_or_path or model_name_or_path",
        )
    values = json.loads(path.read_text(encoding="utf-8"))
    if values.get("version") != STATE_VERSION:
        raise CheckpointError(
            f"{directory.name} was written with layout {values.get('version')}, this Lumen reads {STATE_VERSION}",
            where=str(path),
            fix="resume with the version that wrote it",
        )
    known = {f.name for f in fields(TrainState)}
    return TrainState(**{key: value for key, value in values.items() if key in known})


def restore_weights(directory: Path, model: nn.Module) -> None:
    """Load the trainable parameters.

    Raises CheckpointError when the checkpoint and the model do not train the same parameters.
    """
    saved = load_file(directory / "trainable.safetensors")
    masters = {
        name.removeprefix("master/")
        for name in _tensor_names(directory / "optimizer.safetensors")
        if name.startswith("master/")
    }
    trainable = {n: p for n, p in model.named_parameters() if p.requires_grad}
    missing = sorted(set(trainable) - set(saved) - masters)
    surplus = sorted(set(saved) - set(trainable))
    if missing or surplus:
        example = (missing or surplus)[0]
        raise CheckpointError(
            f"the checkpoint trains other parameters: {len(missing)} are not in it, {len(surplus)} are only in it "
            f"(for example {example})",
            where=str(directory),
            fix="resume with the same finetuning_type, lora_target and freeze settings, or set overwrite_output_dir",
        )
    if (directory / SCALING_FILE).is_file():
        load_histories(model, load_file(directory / SCALING_FILE))
    with torch.no_grad():
        for name, value in saved.items():
            if value.shape != trainable[name].shape:
                raise CheckpointError(
                    f"{name} has shape {tuple(value.shape)} in the checkpoint and {tuple(trainable[name].shape)} here",
                    where=str(directory),
                    fix="resume with the same lora_rank and model",
                )
            trainable[name].copy_(value)


def restore_optimizer(directory: Path, optimizer: NamedOptimizer, state: TrainState) -> None:
    """Load the optimizer's states, and with them the weights that have a master."""
    optimizer.load_named_state(load_file(directory / "optimizer.safetensors"), num_steps=state.optimizer_steps)


def read_rng(directory: Path) -> dict[str, torch.Tensor]:
    """The random state of a checkpoint, for `set_rng_state` just before the first fetch."""
    return load_file(directory / "rng.safetensors")


def _save_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    save_file({name: value.detach().cpu().contiguous() for name, value in tensors.items()}, path)


def _tensor_names(path: Path) -> list[str]:
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        return list(file.keys())
