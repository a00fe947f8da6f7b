"""Memory of a training run, told before it starts, part by part.

A step holds, at its worst moment:

    weights      every parameter, in the dtype or codes it is stored in
    adapters     LoRA's A and B
    gradients    one per trainable parameter
    optimizer    AdamW's two moments per trainable parameter
    activations  what the forward pass keeps for the backward pass (traced; see `trace`), or, with checkpointing, one
                 input per layer and everything of the one layer that is being recomputed
    loss         one chunk of logits, its gradient, and the gradient of the hidden states
    workspace    what the backward pass of one layer needs beside all that, and one weight matrix that is dequantised
    runtime      Python, torch and its libraries, before any tensor

Parts are summed: their peaks do not all coincide, so the sum is an upper estimate in the way that is useful before a
run.  `bench/memory_estimate.py` puts estimates beside the memory of real runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lumen.core.log import note
from lumen.objectives.linear_cross_entropy import CHUNK_BYTES
from lumen.planner.shape import ModelShape
from lumen.planner.trace import Saved, saved_for_backward

BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}

RUNTIME_CPU = 460 << 20
"""Resident memory of a Python process after `import torch, transformers, peft` (CPU build)."""


@dataclass(frozen=True)
class RunShape:
    """The numbers of a run.

    micro_batch, tokens: rows and row length of one forward pass.
    dtype:         compute dtype: bf16, fp16 or fp32.
    finetuning:    lora, freeze or full.
    trainable:     number of trainable parameters; None: by `finetuning` and the settings below.
    lora_rank, lora_target, lora_dropout: adapters.
    trainable_layers: decoder layers that train with `freeze`.
    frozen_bytes:  bytes per parameter of a frozen linear layer's weight; None: the compute dtype's.
    master_bytes:  bytes per trainable parameter as stored (fp32: 4; pure bf16: 2).
    compute_copy:  a trainable parameter is also held in the compute dtype (fp32 master, bf16 compute).
    gradient_bytes, optimizer_bytes: bytes per trainable parameter of the gradient and of both moments.
    checkpointing: decoder layers are recomputed in the backward pass.
    logit_bytes:   fp32 logits held at once.
    runtime_bytes: what the process holds before any tensor.
    """

    micro_batch: int
    tokens: int
    dtype: str = "bf16"
    finetuning: str = "lora"
    trainable: int | None = None
    lora_rank: int = 8
    lora_target: tuple[str, ...] = ("all",)
    lora_dropout: float = 0.0
    trainable_layers: int = 2
    frozen_bytes: float | None = None
    master_bytes: float = 4.0
    compute_copy: bool = False
    gradient_bytes: float = 4.0
    optimizer_bytes: float = 8.0
    checkpointing: bool = True
    logit_bytes: int = CHUNK_BYTES
    runtime_bytes: int = RUNTIME_CPU


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes by part, in the order of the module's docstring; `notes` say what was assumed."""

    parts: Mapping[str, int]
    trainable: int
    parameters: int
    notes: tuple[str, ...] = ()

    @property
    def total(self) -> int:
        """The sum of all parts, bytes."""
        return sum(self.parts.values())

    def table(self) -> list[str]:
        """Lines to print: a row per part, and the sum."""
        rows = [*self.parts.items(), ("total", self.total)]
        return [f"{name:<12} {size / 2**30:8.2f} GiB" for name, size in rows] + [f"  {note}" for note in self.notes]


def trainable_parameters(shape: ModelShape, run: RunShape) -> int:
    """How many parameters train, by the method's settings."""
    if run.trainable is not None:
        return run.trainable
    if run.finetuning == "full":
        return shape.total
    if run.finetuning == "freeze":
        return shape.layer * min(abs(run.trainable_layers), shape.layers)
    return shape.lora_parameters(run.lora_rank, run.lora_target)


def estimate(shape: ModelShape, run: RunShape, saved: Saved | None = None) -> MemoryEstimate:
    """The memory of one training process.

    saved: traced bytes of activations; default: traced here from `shape.config` (about 0.2 s).
    """
    compute = BYTES[run.dtype]
    trainable = trainable_parameters(shape, run)
    notes: list[str] = []
    lora = run.finetuning == "lora"
    in_base = 0 if lora else trainable  # trainable parameters that are the base's own
    if saved is None:
        saved = _traced(shape, run, notes)

    frozen_linear = max(0, shape.linear - in_base)  # trained layers are linear layers first; norms hardly weigh
    frozen_other = shape.total - in_base - frozen_linear
    frozen_rate = compute if run.frozen_bytes is None else run.frozen_bytes
    weights = frozen_linear * frozen_rate + frozen_other * compute
    weights += in_base * (run.master_bytes + (compute if run.compute_copy else 0))

    rows = run.micro_batch * run.tokens
    stream = rows * shape.hidden * compute
    kept_layers = shape.layers if run.finetuning != "freeze" else min(abs(run.trainable_layers), shape.layers)
    if run.checkpointing:
        activations = kept_layers * stream + saved.layer + saved.rest
    else:
        activations = kept_layers * saved.layer + saved.rest

    chunk = min(run.logit_bytes, rows * shape.vocab * 4)
    loss = chunk + chunk * compute // 4 * 2 + 2 * stream
    if run.finetuning == "full":
        loss += shape.head * 4  # the head's gradient is accumulated in fp32

    widest = max((row.outputs for row in shape.linears), default=shape.hidden)
    workspace = rows * (2 * widest + 4 * shape.hidden) * max(compute, 4 if lora else compute)
    if run.frozen_bytes is not None and run.frozen_bytes < compute:
        workspace += max((row.inputs * row.outputs for row in shape.linears), default=0) * compute
    parts = {
        "weights": int(weights),
        "adapters": int(trainable * run.master_bytes) if lora else 0,
        "gradients": int(trainable * run.gradient_bytes),
        "optimizer": int(trainable * run.optimizer_bytes),
        "activations": int(activations),
        "loss": int(loss),
        "workspace": int(workspace),
        "runtime": run.runtime_bytes,
    }
    return MemoryEstimate(parts, trainable, shape.total + (trainable if lora else 0), tuple(notes))


def _traced(shape: ModelShape, run: RunShape, notes: list[str]) -> Saved:
    """Trace the layer's kept bytes; where a model's code cannot run without storage, a formula, and it is said."""
    import torch

    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[run.dtype]
    lora = run.finetuning == "lora"
    try:
        return saved_for_backward(
            shape.config,
            rows=run.micro_batch,
            tokens=run.tokens,
            dtype=dtype,
            lora_rank=run.lora_rank if lora else 0,
            lora_targets=run.lora_target,
            lora_dropout=run.lora_dropout,
        )
    except Exception as error:  # any architecture's own code ran here
        note(f"activation memory is a formula, not traced: {type(error).__name__}")
        notes.append("activations by formula (the model's code does not run without storage)")
        return formula(shape, run)


def formula(shape: ModelShape, run: RunShape) -> Saved:
    """Kept bytes by the shapes of the linear layers alone: every linear input once, normalisations in fp32 twice."""
    compute = BYTES[run.dtype]
    per_token = 0.0
    for row in shape.linears:
        share = row.count / shape.layers
        per_token += share * (row.inputs * (4 if run.finetuning == "lora" else compute) + row.outputs * compute)
    per_token += 4 * shape.hidden * 4
    rows = run.micro_batch * run.tokens
    return Saved(layer=int(rows * per_token), rest=rows * shape.hidden * (compute + 8))


def run_shape(config: Any, *, tokens: int | None = None, **numbers: Any) -> RunShape:
    """A RunShape from a run's flat configuration (any object with its keys); `numbers` override.

    tokens: the row length to plan for; default cutoff_len.
    """
    dtype = "bf16" if config.bf16 or config.pure_bf16 else "fp16" if config.fp16 else "fp32"
    checkpointing = config.gradient_checkpointing
    if checkpointing is None:
        checkpointing = not config.disable_gradient_checkpointing
    values: dict[str, Any] = {
        "micro_batch": config.per_device_train_batch_size,
        "tokens": tokens or config.cutoff_len,
        "dtype": dtype,
        "finetuning": config.finetuning_type,
        "lora_rank": config.lora_rank,
        "lora_target": tuple(config.lora_target),
        "lora_dropout": config.lora_dropout,
        "trainable_layers": config.freeze_trainable_layers,
        "master_bytes": 2.0 if config.pure_bf16 else 4.0,
        "gradient_bytes": 2.0 if config.pure_bf16 else 4.0,
        "checkpointing": checkpointing,
    }
    return RunShape(**{**values, **numbers})
