"""The architecture at a glance: from a configuration to a model ready to train, in this order and nowhere else.

    load (quantise while streaming) → quantise → adapt → checkpoint-wrap → fuse plain LoRA, compile per decoder layer
    → shard (not built yet)

Quantising comes before adapting, so adapters are never quantised; wrapping comes before compiling, so that a recomputed
layer is a compiled one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from lumen.adapters.adapt import adapt
from lumen.adapters.fused import fuse_lora
from lumen.adapters.load import adopt_vocabulary
from lumen.adapters.native import use_native_lora
from lumen.checkpoint import seed_everything
from lumen.core.errors import ConfigError
from lumen.data.build import build_datasets
from lumen.data.loader import Loader, is_packed, loader_for
from lumen.kernels.cpu import library as native
from lumen.memory.checkpointing import apply_checkpointing
from lumen.models.attention import use_native_attention
from lumen.models.compile import compile_layers
from lumen.models.freeze import count_parameters
from lumen.models.load import load_model
from lumen.objectives.head import head_plan
from lumen.optim import make_optimizer, parameter_groups
from lumen.planner import MemoryEstimate, ModelShape, estimate, run_shape
from lumen.quant.api import quantize
from lumen.quant.linear import QuantLinear
from lumen.quant.live import set_seed
from lumen.quant.report import report
from lumen.quant.stream import Stream
from lumen.trainer.calibrate import calibrate
from lumen.trainer.config import RunConfig
from lumen.trainer.plan import total_steps
from lumen.trainer.run import Run


def stream_of(config: RunConfig) -> Stream | None:
    """A base that never trains is quantised while it is read; what may train is loaded first (freeze decides later)."""
    if config.quant == type(config.quant)() or config.finetuning_type != "lora":
        return None
    return Stream(config.quant, frozen=True)


def compute_dtype(config: RunConfig) -> torch.dtype:
    """Dtype of the model's weights and products: bf16 (also pure_bf16), fp16, or fp32 where none is asked for."""
    if config.fp16 and (config.bf16 or config.pure_bf16):
        raise ConfigError("fp16 and bf16 exclude each other", where="fp16, bf16", fix="keep one of them")
    if config.bf16 or config.pure_bf16:
        return torch.bfloat16
    return torch.float16 if config.fp16 else torch.float32


def build(config: RunConfig, checkpoint: Path | None = None) -> Run:
    """Everything a training needs.

    checkpoint: what the run will go on from.  Raises LumenError with place and remedy for whatever does not fit.
    """
    seed_everything(config.seed)
    native.switch(config.native_kernels == "auto")
    loaded = load_model(config, dtype=compute_dtype(config), device=config.device, stream=stream_of(config))
    adopt_vocabulary(loaded, config.adapter_name_or_path, config)
    datasets = build_datasets(config, loaded.tokenizer, seed=config.seed, stage=config.stage)
    facts: dict[str, Any] = {"base": str(loaded.source), "data": datasets.report, "loaded": loaded}

    if loaded.quant is not None:
        facts["quant"] = loaded.quant
        if config.finetuning_type == "full":
            raise ConfigError(
                "the model's weights are stored as codes, which full fine-tuning does not change",
                where="finetuning_type, model_name_or_path",
                fix="use finetuning_type: lora, or load the original weights",
            )
    elif config.quant != type(config.quant)():
        facts["quant"] = quantize(loaded.model, config.quant)
    set_seed(loaded.model, config.seed)
    train_loader, eval_loader = loaders(config, datasets, loaded.tokenizer)
    if calibrate(loaded.model, config, train_loader, loaded.device, checkpoint):
        facts["quant"] = report(loaded.model, facts["quant"].recipe, facts["quant"].target)
    model = adapt(loaded, config, seed=config.seed)
    if config.pure_bf16:
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.to(torch.bfloat16)
    head_plan(model)  # its numeric check runs before layers are compiled, for its own small shape
    facts["checkpointing"] = apply_checkpointing(
        model, config, lambda: memory_of(config, loaded.model, train_loader, checkpointing=False).parts["activations"]
    )
    facts["fused"] = fuse_lora(model)
    facts["native"] = use_native_lora(model)
    if config.flash_attn == "auto":
        use_native_attention(model)
    compile_layers(
        model,
        config.compile,
        steps=total_steps(config, train_loader) * config.gradient_accumulation_steps,
        own_attention=config.flash_attn == "auto",
        fixed_length=all(loader.fixed_length for loader in (train_loader, eval_loader) if loader is not None),
    )
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


def loaders(config: RunConfig, datasets: Any, tokenizer: Any) -> tuple[Loader, Loader | None]:
    """The training loader, and the held-out one where there are held-out rows."""
    common: dict[str, Any] = {
        "seed": config.seed if config.data_seed is None else config.data_seed,
        "pad_token_id": tokenizer.pad_token_id,
        "stage": config.stage,
    }
    train = loader_for(config, datasets.train, batch_size=config.per_device_train_batch_size, **common)
    if not datasets.eval:
        return train, None
    (held_out,) = datasets.eval.values()
    batch_size = config.per_device_eval_batch_size
    return train, loader_for(config, held_out, batch_size=batch_size, train=False, **common)


def longest_row(config: RunConfig, loader: Loader) -> int:
    """Tokens of the longest row to expect."""
    longest = int(loader.store.lengths.max())
    return config.cutoff_len if is_packed(config, config.stage) else min(longest, config.cutoff_len)


def memory_of(config: RunConfig, model: Any, loader: Loader, *, checkpointing: bool) -> MemoryEstimate:
    """The planner's estimate for what this run really does: its longest row, its trainable parameters, its dtypes."""
    low = compute_dtype(config) != torch.float32 and config.finetuning_type != "lora" and not config.pure_bf16
    shape = run_shape(
        config,
        tokens=longest_row(config, loader),
        trainable=count_parameters(model).trainable,
        checkpointing=checkpointing,
        compute_copy=low,  # a 16-bit weight and its fp32 master
        **({"gradient_bytes": 2.0} if low else {}),
        frozen_bytes=stored_bytes(model),
    )
    return estimate(ModelShape.of(model.config), shape)


def stored_bytes(model: Any) -> float | None:
    """Bytes per weight of the layers that hold codes, scales included; None where none does."""
    size = weights = 0
    for module in model.modules():
        if isinstance(module, QuantLinear) and module.spec is not None:
            held = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
            size += sum(t.numel() * t.element_size() for name, t in held if name != "bias")
            weights += module.in_features * module.out_features
    return size / weights if weights else None
