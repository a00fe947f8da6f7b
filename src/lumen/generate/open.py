"""Open a model for answering: base, adapters and template as the configuration names them.

The same keys as in training mean the same here: `model_name_or_path`, `adapter_name_or_path`, `template`, and a
`quant.recipe` that stores the base as codes, so that an adapter meets the base it was trained on.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lumen.adapters.load import adapter_base, find_adapter, load_adapter
from lumen.adapters.merge import merge_in_place
from lumen.adapters.save import CONFIG as ADAPTER_CONFIG
from lumen.core import ConfigError, say
from lumen.data.templates import apply_template
from lumen.models.device import describe_device
from lumen.models.load import LoadedModel, inference_dtype, load_model
from lumen.quant.api import quantize


def with_base(config: Any) -> Any:
    """The configuration with its base filled in: an adapter's folder names the model that it belongs to.

    `model_name_or_path` may itself be an adapter's folder.
    """
    given = config.model_name_or_path
    folder = Path(given).expanduser() if given else None
    if folder is not None and (folder / ADAPTER_CONFIG).is_file() and not (folder / "config.json").is_file():
        if config.adapter_name_or_path:
            raise ConfigError(
                f"{given} is an adapter, and adapter_name_or_path is given too",
                where="model_name_or_path, adapter_name_or_path",
                fix=f"give the base model ({adapter_base(folder)}) as the model",
            )
        config = config.model_copy(update={"model_name_or_path": None, "adapter_name_or_path": [given]})
    if config.model_name_or_path or not config.adapter_name_or_path:
        return config
    base = adapter_base(find_adapter(config.adapter_name_or_path[0], config))
    if not base:
        raise ConfigError("the adapter names no base model", where="model_name_or_path", fix="give the base model")
    return config.model_copy(update={"model_name_or_path": base})


def open_model(config: Any) -> LoadedModel:
    """Load, quantise, adapt; several adapters are merged in order and the last stays separate.

    config: a RunConfig, or any object with the keys of ModelConfig, AdapterConfig, QuantConfig and DataConfig.
    """
    config = with_base(config)
    device = getattr(config, "device", "auto")
    loaded = load_model(config, dtype=inference_dtype(config), device=device)
    if config.quant != type(config.quant)():
        quantize(loaded.model, config.quant, frozen=True)
    names = list(config.adapter_name_or_path or [])
    for number, name in enumerate(names):
        load_adapter(loaded, name, config=config)
        if number < len(names) - 1:
            loaded.model, _ = merge_in_place(loaded.model)
    apply_template(loaded.tokenizer, config.template)
    parts = [str(loaded.source), *names]
    say(f"{' + '.join(parts)} on {describe_device(loaded.device)}, {str(loaded.dtype).removeprefix('torch.')}")
    return loaded
