"""One run's whole configuration: every room's mixin and the loop's own keys, flat.

LLaMA-Factory's files are flat, so `RunConfig` is; ownership stays with the rooms, each of which writes its own mixin
and whose functions ask only for that class.  `lumen.config.load` makes a RunConfig from a file; code can also build one
directly: `RunConfig(model_name_or_path=..., dataset="rows.jsonl")`.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from lumen.adapters.config import AdapterConfig
from lumen.core import Config, Count, Float, Int, NonNegative, Positive, Share
from lumen.data.config import DataConfig
from lumen.generate.config import GenerateConfig
from lumen.memory.config import MemoryConfig
from lumen.models.config import ModelConfig
from lumen.monitor.config import MonitorConfig
from lumen.objectives.config import ObjectiveConfig
from lumen.optim.config import OptimConfig
from lumen.quant.config import QuantConfig


def _device(value: str) -> str:
    if not re.fullmatch(r"auto|cpu|cuda(:\d{1,3})?", value):
        raise ValueError("must be auto, cpu, cuda or cuda:N")
    return value


Device = Annotated[str, AfterValidator(_device)]
Seed = Annotated[Int, Field(ge=0, lt=2**63)]
Strategy = Literal["no", "steps", "epoch"]


class TrainConfig(Config):
    """The loop: length, batch, schedule, precision, evaluation, checkpoints (HF names)."""

    output_dir: str | None = None
    """Folder of checkpoints, metrics, plots and the final model. No default: training needs it."""

    overwrite_output_dir: bool = False
    """Start afresh in an output_dir that holds a checkpoint, instead of resuming it. Default: false."""

    resume_from_checkpoint: str | bool | None = None
    """A checkpoint to resume: a path, or true for the newest. Default: null, the newest in output_dir if there is one
    and overwrite_output_dir is false; false: do not resume."""

    do_train: bool = True
    """Train. Default: true."""

    num_train_epochs: Positive = 3.0
    """Passes over the data, also fractions. Default: 3."""

    max_steps: Int = -1
    """Optimizer steps; overrides num_train_epochs where positive. Default: -1."""

    per_device_train_batch_size: Count = 8
    """Rows of a micro-batch on each device. Default: 8."""

    per_device_eval_batch_size: Count = 8
    """Rows of an evaluation batch on each device. Default: 8."""

    gradient_accumulation_steps: Count = 1
    """Micro-batches of an optimizer step. Default: 1."""

    lr_scheduler_type: Literal[
        "linear", "cosine", "cosine_with_restarts", "cosine_with_min_lr", "polynomial", "constant",
        "constant_with_warmup", "inverse_sqrt",
    ] = "linear"  # fmt: skip
    """Shape of the learning rate after warm-up. Default: linear, to 0."""

    lr_scheduler_kwargs: dict[str, Float] | None = None
    """Settings of the schedule, by HF's names: num_cycles, power, lr_end, min_lr, min_lr_rate, timescale. Default:
    none, the schedule's own."""

    warmup_ratio: Share = 0.0
    """Share of all steps in which the learning rate rises linearly. Default: 0."""

    warmup_steps: NonNegative = 0.0
    """The same as a number of steps (below 1: a share, as in transformers 5); overrides warmup_ratio. Default: 0."""

    bf16: bool = False
    """Load and compute in bfloat16; trainable LoRA parameters stay fp32. Default: false."""

    fp16: bool = False
    """Load and compute in float16 with loss scaling. Default: false."""

    pure_bf16: bool = False
    """As bf16, and trainable parameters are bfloat16 too. Default: false."""

    seed: Seed = 42
    """Seed of initialisation, dropout and rounding. Default: 42."""

    data_seed: Seed | None = None
    """Seed of the sample order. Default: null, seed."""

    device: Device = "auto"
    """auto, cpu, cuda or cuda:N (ROCm's devices are called cuda by torch). Default: auto."""

    compile: Literal["auto", "on", "off"] = "auto"
    """Compile each decoder layer. Default: auto, on where it pays."""

    native_kernels: Literal["auto", "off"] = "auto"
    """Lumen's C++ kernels on a CPU; off: plain torch, the same up to rounding. Default: auto, where they can run."""

    eval_strategy: Strategy = "no"
    """When to evaluate: no, steps or epoch. Default: no."""

    eval_steps: Positive | None = None
    """Optimizer steps between evaluations; below 1: a share of all steps. Default: null, logging_steps."""

    eval_on_start: bool = False
    """Evaluate before the first step. Default: false."""

    save_strategy: Literal["no", "steps", "epoch", "best"] = "steps"
    """When to save a checkpoint: no, steps, epoch or best. Default: steps."""

    save_steps: Positive = 500.0
    """Optimizer steps between checkpoints; below 1: a share of all steps. Default: 500."""

    save_total_limit: Count | None = None
    """Checkpoints kept; the last good and the best are never deleted. Default: null, all."""

    save_only_model: bool = False
    """Checkpoints without optimizer state; they cannot be resumed. Default: false."""

    load_best_model_at_end: bool = False
    """Finish with the weights of the best evaluation. Default: false."""

    metric_for_best_model: str | None = None
    """Evaluation metric that decides what is best. Default: null, eval_loss."""

    greater_is_better: bool | None = None
    """Whether a larger metric is better. Default: null, false for losses."""

    early_stopping_steps: Count | None = None
    """Evaluations without improvement before the run stops. Default: null, never."""

    max_nonfinite_steps: Count = 10
    """Optimizer steps in a row with a non-finite loss or gradient before the run stops. Default: 10."""


class RunConfig(
    TrainConfig,
    GenerateConfig,
    ObjectiveConfig,
    MonitorConfig,
    MemoryConfig,
    DataConfig,
    AdapterConfig,
    ModelConfig,
    OptimConfig,
    QuantConfig,
):
    """Everything a run can be told."""
