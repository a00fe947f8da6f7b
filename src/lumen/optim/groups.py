"""Which parameters share which options: weight decay not on norms and biases, LoRA+ learning rates on lora_B."""

from __future__ import annotations

import re
from typing import Any

from torch import nn

from lumen.core.errors import ConfigError

_NORM_CLASS = re.compile(r"(layer|rms|group|batch|instance)_?norm|norm$", re.IGNORECASE)


def undecayed_names(model: nn.Module) -> set[str]:
    """Names of parameters that weight decay leaves alone: biases, and everything inside a normalisation layer.

    The same set as HF's Trainer: decaying a norm's scale pulls activations towards zero and regularises nothing.
    """
    names = set()
    for module_name, module in model.named_modules():
        is_norm = bool(_NORM_CLASS.search(type(module).__name__))
        for name, _ in module.named_parameters(recurse=False):
            full = f"{module_name}.{name}" if module_name else name
            if is_norm or name == "bias" or full.endswith(".bias"):
                names.add(full)
    return names


def parameter_groups(
    model: nn.Module,
    *,
    lr: float,
    weight_decay: float,
    loraplus_lr_ratio: float | None = None,
    loraplus_lr_embedding: float = 1e-6,
) -> list[dict[str, Any]]:
    """Groups of the trainable parameters with `named_params`, `lr` and `weight_decay`.

    loraplus_lr_ratio: learning rate of every lora_B over that of lora_A (LoRA+, Hayou et al. 2024, arXiv 2402.12354);
    LoRA embedding matrices then take `loraplus_lr_embedding`, as in that paper's code.
    Raises ConfigError when nothing is trainable.
    """
    undecayed = undecayed_names(model)
    buckets: dict[tuple[float, float], list] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        rate = lr
        if loraplus_lr_ratio is not None:
            if "lora_embedding_" in name:
                rate = loraplus_lr_embedding
            elif "lora_B" in name:
                rate = lr * loraplus_lr_ratio
        decay = 0.0 if name in undecayed else weight_decay
        buckets.setdefault((rate, decay), []).append((name, parameter))
    if not buckets:
        raise ConfigError(
            "nothing is trainable: every parameter is frozen",
            where="finetuning_type, lora_target, freeze_trainable_modules",
            fix="choose finetuning_type lora or full, or name modules that exist in this model",
        )
    return [{"named_params": named, "lr": rate, "weight_decay": decay} for (rate, decay), named in buckets.items()]
