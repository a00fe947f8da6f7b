"""The architecture at a glance: from a configuration to a model ready to train, in this order and nowhere else.

    load → quantise → adapt → checkpoint-wrap → compile per decoder layer → shard (not built yet)

Quantising comes before adapting, so adapters are never quantised; wrapping comes before compiling, so that a recomputed
layer is a compiled one.
"""

from __future__ import annotations

from typing import Any

import torch

from lumen.adapters.adapt import adapt
from lumen.checkpoint import seed_everything
from lumen.core.errors import ConfigError
from lumen.data.build import build_datasets
from lumen.data.loader import Loader
from lumen.memory.checkpointing import apply_checkpointing
from lumen.models.freeze import count_parameters
from lumen.models.load import load_model
from lumen.objectives.head import head_plan
from lumen.optim import make_optimizer, parameter_groups
from lumen.quant.api import quantize
from lumen.trainer.config import RunConfig
from lumen.trainer.plan import total_steps
from lumen.trainer.run import Run


def compute_dtype(config: RunConfig) -> torch.dtype:
    """Dtype of the model's weights and products: bf16 (also pure_bf16), fp16, or fp32 where none is asked for."""
    if config.fp16 and (config.bf16 or config.pure_bf16):
        raise ConfigError("fp16 and bf16 exclude each other", where="fp16, bf16", fix="keep one of them")
    if config.bf16 or config.pure_bf16:
        return torch.bfloat16
    return torch.float16 if config.fp16 else torch.float32


def build(config: RunConfig) -> Run:
    """Everything a training needs.  Raises LumenError with place and remedy for whatever does not fit."""
    seed_everything(config.seed)
    loaded = load_model(config, dtype=compute_dtype(config), device=config.device)
    datasets = build_datasets(config, loaded.tokenizer, seed=config.seed, stage=config.stage)
    facts: dict[str, Any] = {"base": str(loaded.source), "data": datasets.report, "loaded": loaded}

    if config.quant != type(config.quant)():
        is_frozen = True if config.finetuning_type == "lora" else None
        facts["quant"] = quantize(loaded.model, config.quant, frozen=is_frozen)
    model = adapt(loaded, config, seed=config.seed)
    if config.pure_bf16:
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.to(torch.bfloat16)
    head_plan(model)  # its numeric check runs before layers are compiled, for its own small shape
    train_loader, eval_loader = loaders(config, datasets, loaded.tokenizer)
    facts["checkpointing"] = apply_checkpointing(model, config, tokens=batch_tokens(config, train_loader))
    facts["compiled"] = compile_model(model, config, total_steps(config, train_loader))
    facts["parameters"] = count_parameters(model)

    groups = parameter_groups(
        model,
        lr=config.learning_rate,
        weight_decay=config.weight_decay,
        loraplus_lr_ratio=config.loraplus_lr_ratio,
        loraplus_lr_embedding=config.loraplus_lr_embedding,
    )
    optimizer = make_optimizer(
        config.optim,
        groups,
        lr=config.learning_rate,
        betas=(config.adam_beta1, config.adam_beta2),
        eps=config.adam_epsilon,
        weight_decay=config.weight_decay,
        master="bf16" if config.pure_bf16 else "fp32",
        seed=config.seed,
    )
    return Run(
        config=config,
        model=model,
        tokenizer=loaded.tokenizer,
        device=loaded.device,
        dtype=loaded.dtype,
        optimizer=optimizer,
        train_loader=train_loader,
        eval_loader=eval_loader,
        data_fingerprint=datasets.train.fingerprint,
        facts=facts,
    )


def packs(config: RunConfig) -> bool:
    """Whether rows share a sequence: `packing`, `neat_packing`, and by default for stage pt."""
    if config.packing is not None:
        return config.packing
    return config.neat_packing or config.stage == "pt"


def loaders(config: RunConfig, datasets: Any, tokenizer: Any) -> tuple[Loader, Loader | None]:
    """The training loader, and the held-out one where there are held-out rows."""
    common: dict[str, Any] = {"cutoff_len": config.cutoff_len, "pad_token_id": tokenizer.pad_token_id or 0}
    seed = config.seed if config.data_seed is None else config.data_seed
    train = Loader(
        datasets.train,
        config.per_device_train_batch_size,
        seed,
        packing=packs(config),
        shuffle=not config.disable_shuffling,
        **common,
    )
    if not datasets.eval:
        return train, None
    (held_out,) = datasets.eval.values()
    held = Loader(held_out, config.per_device_eval_batch_size, seed, packing=packs(config), shuffle=False, **common)
    return train, held


def batch_tokens(config: RunConfig, loader: Loader) -> int:
    """Tokens of the largest micro-batch to expect: rows times the longest row."""
    longest = config.cutoff_len if packs(config) else int(loader.store.lengths.max())
    return config.per_device_train_batch_size * min(longest, config.cutoff_len)


def compile_model(model: Any, config: RunConfig, steps: int) -> bool:
    """Compile each decoder layer where that pays; returns whether it was done."""
    try:
        from lumen.models.compile import compile_layers
    except ImportError:
        return False
    compile_layers(model, config.compile, steps=steps)
    return config.compile != "off"
