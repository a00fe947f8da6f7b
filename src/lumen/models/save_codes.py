"""Save a quantised model as a directory that others load: codes in their format's keys, and a config that says so.

All weights in NF4 make a bitsandbytes checkpoint, which transformers loads with bitsandbytes.  Everything else says
`quant_method: lumen` and names each module's spec, so that another tool refuses it instead of reading codes as weights.
Both load here with `load_model`, as codes, with the same bytes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from lumen.core import ModelError
from lumen.core.files import atomic_write_json
from lumen.formats import QuantSpec
from lumen.quant.experts import QuantStack
from lumen.quant.linear import QuantLinear
from lumen.quant.modules import is_conv1d


def save_codes(model: Any, directory: Path | str, *, max_shard_size: str = "5GB") -> None:
    """Write weights (codes stay codes), config.json and generation_config.json into `directory`.

    Raises ModelError for a model that holds no codes, an adapted one, and scales that are not in a weight's keys.
    """
    from huggingface_hub import save_torch_state_dict

    if any(hasattr(module, "base_layer") for module in model.modules()):
        raise ModelError(
            "the model carries an adapter",
            where="save_codes",
            fix="save the adapter (lumen.adapters.save), or merge it",
        )
    specs = {n: m.spec for n, m in model.named_modules() if isinstance(m, (QuantLinear, QuantStack)) and m.spec}
    if not specs:
        raise ModelError("no weight of this model is stored as codes", where="save_codes", fix="use save_pretrained")
    smoothed = [name for name, spec in specs.items() if spec.transform == "smooth" or spec.scaling != "dynamic"]
    if smoothed:
        raise ModelError(f"{smoothed[0]} needs more than its codes ({specs[smoothed[0]]})", where="save_codes")
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    tied = list(getattr(model, "_tied_weights_keys", None) or []) if model.config.tie_word_embeddings else []
    save_torch_state_dict(
        model.state_dict(), folder, max_shard_size=max_shard_size, metadata={"format": "pt"},
        shared_tensors_to_discard=tied,
    )  # fmt: skip
    settings = model.config.to_dict()
    settings["architectures"] = [type(model).__name__]
    settings["dtype"] = str(model.dtype).removeprefix("torch.")
    settings["quantization_config"] = _settings(model, specs)
    atomic_write_json(folder / "config.json", _plain(settings))
    if getattr(model, "generation_config", None) is not None:
        model.generation_config.save_pretrained(folder)


def _settings(model: nn.Module, specs: dict[str, QuantSpec]) -> dict[str, Any]:
    stacks = [name for name in specs if isinstance(model.get_submodule(name), QuantStack)]
    kinds = set(specs.values())
    (first, *more) = kinds
    if first.element != "nf4" or more or stacks:
        return {
            "quant_method": "lumen",
            "modules": {name: str(spec) for name, spec in specs.items()},
            "stacks": stacks,
        }
    left = [n for n, m in model.named_modules() if n not in specs and (isinstance(m, nn.Linear) or is_conv1d(m))]
    return {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "load_in_8bit": False,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": first.double_quant,
        "bnb_4bit_compute_dtype": str(getattr(model, "dtype", torch.bfloat16)).removeprefix("torch."),
        "bnb_4bit_quant_storage": "uint8",
        "llm_int8_skip_modules": left or ["lm_head"],
    }


def _plain(value: Any) -> Any:
    """JSON without torch's types."""
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else value
