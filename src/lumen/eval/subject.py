"""What is evaluated: a model alone, or a base and what training made of it.

A run of LoRA leaves an adapter, so base and tuned are one model with the adapter switched off and on.  A full or freeze
run leaves whole weights, so they are two models, loaded one after the other and never at the same time.
Loading follows the order of `trainer.build`: load → quantise → adapt.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from lumen.adapters.load import load_adapter
from lumen.adapters.merge import merge_in_place
from lumen.core import ModelError, note
from lumen.models.load import LoadedModel, inference_dtype, load_model
from lumen.quant.api import quantize
from lumen.trainer.build import compute_dtype
from lumen.trainer.config import RunConfig


@dataclass(frozen=True)
class Subject:
    """What to load.

    config:   the model, its dtype, recipe and (where `tuned` is not given) adapters.
    tuned:    a directory that training wrote: an adapter, or whole weights; None: config.adapter_name_or_path.
    trained:  whether `config` is a training's: then the dtype is the training's where infer_dtype is auto.
    """

    config: RunConfig
    tuned: Path | None = None
    trained: bool = False

    @property
    def adapters(self) -> list[str]:
        """Adapter directories in order; all but the last are merged into the base."""
        if self.tuned is not None:
            return [str(self.tuned)] if (self.tuned / "adapter_config.json").is_file() else []
        return list(self.config.adapter_name_or_path or [])

    @property
    def whole_weights(self) -> Path | None:
        """The directory of a full or freeze run's weights."""
        return self.tuned if self.tuned is not None and not self.adapters else None

    @property
    def has_two(self) -> bool:
        """Whether there is a before and an after."""
        return bool(self.adapters) or self.whole_weights is not None


@dataclass
class View:
    """One thing to measure: `base` or `tuned` (or `model`, where there is only one), and its name for people."""

    label: str
    name: str
    loaded: LoadedModel


def views(subject: Subject, *, base: bool = True) -> Iterator[View]:
    """Load and yield what is to be measured, in order; each view is valid until the next is asked for.

    base: also the model before training, where there are two.
    """
    config = subject.config
    if subject.whole_weights is not None:
        if base:
            yield View("base", str(config.model_name_or_path), _load(subject, config))
        tuned = config.model_copy(update={"model_name_or_path": str(subject.whole_weights)})
        yield View("tuned", str(subject.whole_weights), _load(subject, tuned))
        return
    loaded = _load(subject, config)
    adapters = subject.adapters
    if not adapters:
        yield View("model", str(loaded.source), loaded)
        return
    for name in adapters[:-1]:
        load_adapter(loaded, name, config=config)
        loaded.model, report = merge_in_place(loaded.model)
        report.check(allow_unchanged=True)
    load_adapter(loaded, adapters[-1], config=config)
    if base:
        with loaded.model.disable_adapter():
            yield View("base", str(config.model_name_or_path), loaded)
    yield View("tuned", adapters[-1], loaded)


def _load(subject: Subject, config: RunConfig) -> LoadedModel:
    dtype = inference_dtype(config)
    if dtype is None and subject.trained:
        dtype = compute_dtype(config)
    loaded = load_model(config, dtype=dtype, device=config.device)
    if config.quant != type(config.quant)():
        note(f"evaluated with recipe {config.quant.recipe}, as trained; `quant=bf16` measures without it")
        quantize(loaded.model, config.quant, frozen=True)
    for parameter in loaded.model.parameters():
        parameter.requires_grad_(False)
    loaded.model.eval()
    return loaded


def check_tuned(directory: Path) -> Path:
    """The directory, if training ended there.  Raises ModelError where it holds no weights (yet)."""
    names = ("adapter_config.json", "config.json")
    if any((directory / name).is_file() for name in names):
        return directory
    raise ModelError(
        f"{directory} is a run without final weights",
        where=str(directory),
        fix="let the training end (run the same `lumen train` again to resume), or give a checkpoint as --adapter",
    )
