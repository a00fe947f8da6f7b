"""How the model is adapted: the LoRA part of the flat configuration."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from lumen.core import Config, Count, Float, Int, Positive, StrList


class AdapterConfig(Config):
    """The fine-tuning method and the LoRA family's settings (LLaMA-Factory's names and defaults)."""

    finetuning_type: Literal["lora", "freeze", "full"] = "lora"
    """lora, freeze (a few layers) or full. `qlora` is read as lora with `quant.recipe: nf4`. Default: lora."""

    adapter_name_or_path: StrList | None = None
    """Adapter directories: all but the last are merged, the last is continued, or all are merged with
    create_new_adapter. Default: none."""

    create_new_adapter: bool = False
    """Merge the given adapters and train a fresh one. Default: false."""

    lora_rank: Count = 8
    """Rank r of the update B·A. Default: 8."""

    lora_alpha: Positive | None = None
    """Scale: the update is multiplied by alpha / r. Default: 2 × lora_rank."""

    lora_dropout: Annotated[Float, Field(ge=0, lt=1)] = 0.0
    """Dropout on the adapter's input, 0 to below 1. Default: 0."""

    lora_target: StrList = ["all"]
    """Names of the linear modules that get an adapter; all: every linear layer but the head. Default: all."""

    additional_target: StrList | None = None
    """Modules trained in full and saved beside the adapter (PEFT's modules_to_save). Default: none."""

    use_rslora: bool = False
    """Scale by alpha / sqrt(r) (rank-stabilised LoRA). Default: false."""

    use_dora: bool = False
    """Weight-decomposed LoRA. Default: false."""

    init_lora_weights: bool | str = "default"
    """Start values: default, gaussian, orthogonal, pissa, pissa_niter_N or olora. Default: default (A random, B 0)."""

    pissa_init: bool = False
    """Initialise from the principal singular vectors (PiSSA). Default: false."""

    pissa_iter: Int = 16
    """Power iterations of PiSSA's fast SVD; -1: exact SVD. Default: 16."""
