"""The adapting step of build: decide what trains, from `finetuning_type` and the adapters that were given."""

from __future__ import annotations

from typing import Any

from lumen.adapters.config import AdapterConfig
from lumen.adapters.inject import inject
from lumen.adapters.load import load_adapter
from lumen.adapters.merge import merge_in_place
from lumen.core import ConfigError
from lumen.models.config import ModelConfig
from lumen.models.freeze import apply_freeze, train_all
from lumen.models.load import LoadedModel


class AdaptConfig(AdapterConfig, ModelConfig):
    """What `adapt` reads; RunConfig is one."""


def adapt(loaded: LoadedModel, config: AdaptConfig | Any, *, seed: int = 42) -> Any:
    """Make `loaded.model` trainable as configured and return it (also set on `loaded`).

    full:   every parameter trains.
    freeze: some layers or modules (`models.freeze.apply_freeze`).
    lora:   a fresh adapter; or, with adapter_name_or_path, all adapters but the last are merged into the base in
            order and the last is continued; with create_new_adapter all are merged and a fresh one is made.
    """
    kind = config.finetuning_type
    names = list(config.adapter_name_or_path or [])
    if names and kind != "lora":
        raise ConfigError(
            f"adapter_name_or_path does not go with finetuning_type: {kind}",
            where="adapter_name_or_path, finetuning_type",
            fix="merge the adapter first (lumen merge), or use finetuning_type: lora",
        )
    if kind == "full":
        train_all(loaded.model)
    elif kind == "freeze":
        apply_freeze(loaded.model, config, also=loaded.vocabulary_modules)
    else:
        merged = names if config.create_new_adapter else names[:-1]
        for name in merged:
            load_adapter(loaded, name, config=config)
            loaded.model, report = merge_in_place(loaded.model)
            report.check(allow_unchanged=True)
        if len(merged) < len(names):
            load_adapter(loaded, names[-1], trainable=True, config=config)
        else:
            loaded.model = inject(loaded.model, config, vocabulary_modules=loaded.vocabulary_modules, seed=seed)
    return loaded.model
