"""Put LoRA into a model.

LoRA (Hu et al. 2021, arXiv 2106.09685) keeps W [out, in] frozen and learns W + s·B·A with A [r, in] and B [out, r];
s = alpha / r, or alpha / sqrt(r) with rsLoRA (Kalajdzievski 2023).  B starts at zero, so training starts at the base
model.  DoRA (Liu et al. 2024) also learns the length of every output row.  PiSSA (Meng et al. 2024) and OLoRA start
A and B from W's own singular or QR factors and take that part out of W; what is saved is still a plain LoRA of the
unchanged base (`adapters.save`).

All of it is PEFT's; this module turns Lumen's configuration into PEFT's, refuses what would not do what it says, and
keeps what PEFT leaves to the caller: names that exist, tied embeddings that stay tied, one seed for the start values.
LoRA parameters are fp32 also on a bf16 model: an update of 1e-5 of a value is lost in bf16's 8 bits.
"""

from __future__ import annotations

import re
import warnings
from typing import Any

import torch
from torch import nn

from lumen.adapters.config import AdapterConfig
from lumen.adapters.guard import without_bitsandbytes
from lumen.core import ConfigError, note
from lumen.models.layers import (
    embedding_name,
    head_name,
    is_linear,
    is_tied,
    matches,
    resolve_modules,
    resolve_targets,
    stores_codes,
)

ADAPTER = "default"
"""PEFT's name of the adapter that trains."""

INITIAL = "_lumen_initial_adapter"
"""Attribute of the PeftModel with the start values of adapters that changed the base (PiSSA, OLoRA)."""

_REFUSED_INITS = {
    "loftq": "it quantises the base inside PEFT; train a quantised base with `quant.recipe: nf4` instead",
    "eva": "it needs a pass over the data before training, which Lumen does not do",
    "corda": "it needs covariances collected over the data before training, which Lumen does not do",
    "lora_ga": "it needs gradients collected before training, which Lumen does not do",
}
_CHANGES_BASE = ("pissa", "olora")


def initialisation(config: AdapterConfig) -> bool | str:
    """PEFT's `init_lora_weights` for the configuration.  Raises ConfigError for what is unknown or refused."""
    name = config.init_lora_weights
    if config.pissa_init:
        if name not in (True, "default", "pissa"):
            raise ConfigError(
                f"pissa_init: true and init_lora_weights: {name} contradict each other",
                where="pissa_init, init_lora_weights",
                fix="keep one of them",
            )
        name = "pissa" if config.pissa_iter == -1 else f"pissa_niter_{config.pissa_iter}"
    if isinstance(name, bool):
        return name
    name = name.strip().lower()
    if name in ("default", "true"):
        return True
    if name in _REFUSED_INITS:
        raise ConfigError(
            f"init_lora_weights: {name} is not supported: {_REFUSED_INITS[name]}",
            where="init_lora_weights",
            fix="default, gaussian, orthogonal, pissa, pissa_niter_N or olora",
        )
    if name in ("gaussian", "orthogonal", "pissa", "olora") or re.fullmatch(r"pissa_niter_[1-9]\d*", name):
        return name
    raise ConfigError(
        f"init_lora_weights: {name} is unknown",
        where="init_lora_weights",
        fix="default, gaussian, orthogonal, pissa, pissa_niter_N or olora",
    )


def lora_config(model: nn.Module, config: AdapterConfig, *, vocabulary_modules: list[str] | None = None) -> Any:
    """PEFT's LoraConfig for this model.

    vocabulary_modules: leaf names of embedding (and head) to train whole because tokens were added.
    """
    from peft import LoraConfig

    targets = resolve_targets(model, config.lora_target)
    whole = list(dict.fromkeys([*(config.additional_target or []), *(vocabulary_modules or [])]))
    resolve_modules(model, whole, where="additional_target")
    for name in whole:
        if name in targets and config.lora_target != ["all"]:
            raise ConfigError(
                f"{name} is in lora_target and in additional_target",
                where="lora_target, additional_target",
                fix="a module gets an adapter or is trained whole, not both",
            )
    tied_known, whole = _tie(model, whole)
    alpha = 2 * config.lora_rank if config.lora_alpha is None else config.lora_alpha
    return LoraConfig(
        r=config.lora_rank,
        lora_alpha=int(alpha) if float(alpha).is_integer() else alpha,  # type: ignore[arg-type]
        lora_dropout=config.lora_dropout,
        target_modules=sorted(t for t in targets if t not in whole),
        modules_to_save=whole or None,
        use_rslora=config.use_rslora,
        use_dora=config.use_dora,
        init_lora_weights=initialisation(config),  # type: ignore[arg-type]
        ensure_weight_tying=tied_known,
        fan_in_fan_out=any(type(m).__name__ in ("Conv1D", "QuantConv1D") for m in model.modules()),
        task_type="CAUSAL_LM",
    )


def _tie(model: nn.Module, whole: list[str]) -> tuple[bool, list[str]]:
    """Embedding and head of a tied model are trained as one: PEFT ties the names it knows, `tie_saved` the others."""
    from peft.utils.other import EMBEDDING_LAYER_NAMES

    head = head_name(model) if hasattr(model, "get_output_embeddings") else None
    if head is None or not is_tied(model):
        return False, whole
    pair = [embedding_name(model), head]
    named = [name for name in whole if any(matches(part, name) for part in pair)]
    if not named:
        return False, whole
    leaves = [part.rpartition(".")[2] for part in pair]
    rest = [name for name in whole if name not in named]
    if all(leaf in EMBEDDING_LAYER_NAMES for leaf in leaves):
        return True, [*rest, leaves[0]]
    return False, [*rest, *leaves]


def tie_saved(model: Any) -> None:
    """Make the trained copies of a tied embedding and head one parameter, where PEFT did not."""
    if not getattr(model.config, "tie_word_embeddings", False):
        return
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    for adapter in getattr(embedding, "modules_to_save", {}):
        if adapter in getattr(head, "modules_to_save", {}):
            head.modules_to_save[adapter].weight = embedding.modules_to_save[adapter].weight


def inject(
    model: nn.Module, config: AdapterConfig, *, vocabulary_modules: list[str] | None = None, seed: int = 42
) -> Any:
    """Wrap `model` in a PeftModel whose LoRA parameters (fp32) and modules_to_save train; all else is frozen.

    Start values depend on `seed` alone, not on what ran before.  Raises ConfigError or ModelError for targets that do
    not exist, initialisations that cannot be, and ones that would change a base stored as codes.
    """
    from peft import get_peft_model

    settings = lora_config(model, config, vocabulary_modules=vocabulary_modules)
    changes_base = str(settings.init_lora_weights).startswith(_CHANGES_BASE)
    targeted = [m for n, m in model.named_modules() if any(matches(n, t) for t in settings.target_modules)]
    if changes_base and any(is_linear(m) and stores_codes(m) for m in targeted):
        raise ConfigError(
            f"init_lora_weights: {settings.init_lora_weights} changes the base weights, which are stored as codes",
            where="init_lora_weights, quant",
            fix="use the default initialisation on a quantised base",
        )
    devices = [p.device for p in model.parameters() if p.device.type == "cuda"][:1]
    with torch.random.fork_rng(devices=devices), warnings.catch_warnings(), without_bitsandbytes(model):
        torch.manual_seed(seed)
        warnings.simplefilter("ignore")  # its advice on tied weights is what `_tie` has acted on
        adapted = get_peft_model(model, settings, adapter_name=ADAPTER)
    tie_saved(adapted)
    if changes_base:
        remember_initial(adapted)
    if settings.modules_to_save:
        note(f"trained whole and saved with the adapter: {', '.join(sorted(set(settings.modules_to_save)))}")
    return adapted


def remember_initial(model: Any) -> None:
    """Keep the start values (CPU, fp32) of an adapter whose initialisation was taken out of the base weights."""
    start = {
        name: parameter.detach().float().cpu().clone()
        for name, parameter in model.named_parameters()
        if ".lora_A." in name or ".lora_B." in name
    }
    object.__setattr__(model, INITIAL, start)
