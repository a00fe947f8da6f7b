"""Writing and reading a run's checkpoints and its final weights.

A checkpoint loads elsewhere as it is: a PEFT adapter, or a transformers model.  Beside that lie the files that only a
resumed run needs (`checkpoint.state`).  `docs/checkpoints.md` is the page for users.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lumen.adapters.save import save_adapter
from lumen.checkpoint import (
    Store,
    TrainState,
    check_resumable,
    config_fingerprint,
    position_values,
    read_rng,
    read_state,
    restore_optimizer,
    restore_weights,
    save_state,
    versions,
)
from lumen.core.errors import CheckpointError, ConfigError
from lumen.core.log import say, warn
from lumen.quant.experts import QuantStack
from lumen.quant.linear import QuantLinear
from lumen.trainer.config import RunConfig
from lumen.trainer.run import Run


def config_values(config: RunConfig) -> dict[str, Any]:
    """The resolved config as plain JSON, without secrets."""
    return config.model_dump(mode="json", exclude={"hf_hub_token"})


def dense_state(model: Any) -> dict[str, torch.Tensor]:
    """A model's state with plain weights where layers hold codes, under the names an ordinary model has."""
    state = dict(model.state_dict())
    for name, module in model.named_modules():
        if isinstance(module, QuantLinear):
            state = {k: v for k, v in state.items() if not k.startswith(f"{name}.") or k == f"{name}.bias"}
            state[f"{name}.weight"] = module.original_weight().contiguous()
        elif isinstance(module, QuantStack):
            state = {k: v for k, v in state.items() if not k.startswith(f"{name}.")}
            state[name] = module.original().detach()
    return state


def save_weights(run: Run, directory: Path, *, card: dict[str, Any] | None = None) -> None:
    """Write the weights into `directory` in the layout that PEFT or transformers loads, with the tokenizer."""
    if run.is_adapter:
        # its own writer replaces a directory whole, so it gets one of its own
        part = directory / "adapter.part"
        save_adapter(run.model, part, card, tokenizer=run.tokenizer)
        for path in part.iterdir():
            path.rename(directory / path.name)
        part.rmdir()
    else:
        run.model.save_pretrained(directory, state_dict=dense_state(run.model))
        run.tokenizer.save_pretrained(directory)
        if card is not None:
            from lumen.adapters.card import render_card

            (directory / "README.md").write_text(render_card(card), encoding="utf-8")


def publish_final(run: Run, card: dict[str, Any]) -> None:
    """The final weights, card and tokenizer in output_dir itself; a file that is replaced is replaced whole."""
    temporary = run.output_dir / ".final.tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        save_weights(run, temporary, card=card)
        for path in sorted(temporary.iterdir()):
            target = run.output_dir / path.name
            if path.is_dir():
                shutil.rmtree(target, ignore_errors=True)
            path.replace(target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def save_checkpoint(run: Run, store: Store, state: TrainState) -> Path:
    """Commit a checkpoint of the present step and apply retention."""
    values = config_values(run.config)
    state.config = values
    state.config_fingerprint = config_fingerprint(values)
    state.positions = position_values(values)
    state.data_fingerprint = run.data_fingerprint
    state.versions = versions()
    with store.write(state.step) as directory:
        save_weights(run, directory)
        if not run.config.save_only_model:
            save_state(directory, state, run.model, run.optimizer)
    store.prune(best=state.best_step)
    return store.path(state.step)


@dataclass
class Resume:
    """A checkpoint to go on from."""

    directory: Path
    state: TrainState


def find_resume(config: RunConfig, store: Store) -> Resume | None:
    """The checkpoint this config goes on from, or None; prints what differs from it.

    resume_from_checkpoint: a path → that one; true → the newest, which must exist; null → the newest in output_dir, if
    there is one and overwrite_output_dir is off; false → none.
    Raises CheckpointError where it is damaged or the position in the data would mean other rows.
    """
    wish = config.resume_from_checkpoint
    if isinstance(wish, str):
        directory = Path(wish)
        if not directory.is_dir():
            raise CheckpointError(f"there is no checkpoint {wish}", where="resume_from_checkpoint")
        problem = store.problem(directory)
        if problem is not None:
            raise CheckpointError(
                f"the checkpoint {wish} is damaged: {problem}",
                where="resume_from_checkpoint",
                fix="leave resume_from_checkpoint out to take the newest whole one",
            )
    elif wish is False or (wish is None and config.overwrite_output_dir):
        return None
    else:
        newest = store.latest()
        if newest is None and wish is True:
            raise CheckpointError(
                "there is no whole checkpoint to resume", where=str(store.root), fix="leave resume_from_checkpoint out"
            )
        if newest is None:
            if store.steps():
                warn(f"no checkpoint in {store.root} is whole; training starts from the beginning")
            return None
        directory = newest
    state = read_state(directory)
    values = config_values(config)
    check_resumable(
        directory=directory.name,
        old_config=state.config,
        new_config=values,
        old_positions=state.positions,
        new_positions=position_values(values),
        old_data="",
        new_data="",
        old_versions=state.versions,
    )
    return Resume(directory, state)


def check_data(resume: Resume, run: Run) -> None:
    """Raises CheckpointError when the training rows are not those the checkpoint was trained on."""
    old = resume.state.data_fingerprint
    if old and old != run.data_fingerprint:
        raise CheckpointError(
            f"this run cannot continue {resume.directory.name}: the training data is not the same "
            "(a file, the template or the tokenizer changed), so the position would mean other rows",
            where="dataset",
            fix="restore the data, or start anew with overwrite_output_dir: true or another output_dir",
        )


def restore(resume: Resume, run: Run) -> dict[str, torch.Tensor]:
    """Load weights, optimizer and loader position; returns the random state, to be set just before the first fetch."""
    restore_weights(resume.directory, run.model)
    restore_optimizer(resume.directory, run.optimizer, resume.state)
    run.train_loader.load_state(resume.state.loader)
    return read_rng(resume.directory)


def restore_best(run: Run, directory: Path) -> None:
    """Put the weights of the best checkpoint into the model."""
    restore_weights(directory, run.model)
    restore_optimizer(directory, run.optimizer, read_state(directory))


def clear_for_fresh_start(config: RunConfig, store: Store) -> None:
    """Remove the checkpoints of an earlier run, which a later resume would take for this run's.

    Raises ConfigError where there are some and nobody asked for overwriting.
    """
    steps = store.steps()
    if not steps:
        return
    if not config.overwrite_output_dir and store.latest() is not None:
        raise ConfigError(
            f"{store.root} holds checkpoints of an earlier run and resuming is switched off",
            where="output_dir, resume_from_checkpoint",
            fix="set overwrite_output_dir: true to replace them, or choose another output_dir",
        )
    say(f"overwriting: removing {len(steps)} checkpoint(s) of an earlier run from {store.root}")
    for step in steps:
        store.remove(step)
