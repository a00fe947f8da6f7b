"""Write an adapter exactly as PEFT does, with what is needed to use it: tokenizer, chat template, a card of the run.

`adapter_config.json` and `adapter_model.safetensors` (keys without the adapter's name, fp32) are PEFT's layout; PEFT,
vLLM and others load the folder as it is.  Nothing asks the network (PEFT's own save asks the hub whether the base's
vocabulary was resized; here it is known).

An adapter that started from the base's own factors (PiSSA, OLoRA) was trained on W − s·B0·A0.  On the unchanged base
it equals the LoRA of rank 2r with A = [A1; A0] and B = [B1, −B0], which is what is written.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from lumen.adapters.card import render_card
from lumen.adapters.inject import ADAPTER, INITIAL
from lumen.core.files import atomic_directory, atomic_write_text

WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"


def adapter_state(model: Any, *, adapter: str = ADAPTER) -> dict[str, torch.Tensor]:
    """The adapter's tensors under PEFT's names on disk, as trained (no conversion); tied ones are separate copies."""
    from peft import get_peft_model_state_dict

    state = get_peft_model_state_dict(model, adapter_name=adapter, save_embedding_layers=False)
    return {name: tensor.detach().cpu().contiguous().clone() for name, tensor in state.items()}


def _as_plain_lora(state: dict[str, torch.Tensor], settings: Any, start: dict[str, torch.Tensor]) -> Any:
    """Fold the start values into A and B (rank 2r); returns the config that fits."""
    settings = copy.deepcopy(settings)
    initial = {name.replace(f".{ADAPTER}.", "."): tensor for name, tensor in start.items()}
    for name in list(state):
        if name.endswith(".lora_A.weight"):
            state[name] = torch.cat([state[name], initial[name].to(state[name].dtype)], dim=0).contiguous()
        elif name.endswith(".lora_B.weight"):
            state[name] = torch.cat([state[name], -initial[name].to(state[name].dtype)], dim=1).contiguous()
    settings.init_lora_weights = True
    settings.r *= 2
    settings.lora_alpha *= 2**0.5 if settings.use_rslora else 2
    return settings


def save_adapter(
    model: Any,
    directory: Path | str,
    card: dict[str, Any] | None = None,
    *,
    tokenizer: Any = None,
    base: str | None = None,
    convert: bool = True,
) -> Path:
    """Write the adapter of a PeftModel into `directory`, whole or not at all; returns the directory.

    card:      facts of the run for README.md (see `adapters.card.render_card`); None writes no card.
    tokenizer: saved with its chat template, so that chat, serving and merging use the tokens of the training.
    base:      what adapter_config.json names as base model; default: what the model was loaded from.
    convert:   False keeps PiSSA and OLoRA factors as trained (a training checkpoint); they fit the changed base only.
    """
    state = adapter_state(model)
    settings = copy.deepcopy(model.peft_config[ADAPTER])
    start = getattr(model, INITIAL, None)
    if start and convert:
        settings = _as_plain_lora(state, settings, start)
    settings.inference_mode = True
    if not isinstance(settings.target_modules, str):
        settings.target_modules = sorted(settings.target_modules or [])  # PEFT keeps a set: its order differs per run
    settings.base_model_name_or_path = base or settings.base_model_name_or_path or model.config.name_or_path or None
    with atomic_directory(Path(directory)) as folder:
        save_file(state, folder / WEIGHTS, metadata={"format": "pt"})
        settings.save_pretrained(str(folder))
        if tokenizer is not None:
            tokenizer.save_pretrained(str(folder))
        if card is not None:
            atomic_write_text(folder / "README.md", render_card(card, settings))
    return Path(directory)
