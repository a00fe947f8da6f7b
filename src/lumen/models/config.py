"""What to load and how: the model's part of the flat configuration."""

from __future__ import annotations

from typing import Literal

from pydantic import SecretStr

from lumen.core import Config, Int, StrList


class ModelConfig(Config):
    """The base model, its tokenizer, the attention it runs and, for `finetuning_type: freeze`, what stays trainable."""

    model_name_or_path: str | None = None
    """A HF directory, a hub id or a .gguf file. No default: every verb that loads a model needs it."""

    model_revision: str = "main"
    """Branch, tag or commit of a hub id. Default: main."""

    cache_dir: str | None = None
    """Where hub downloads are kept. Default: the hub library's own folder."""

    hf_hub_token: SecretStr | None = None
    """Token for gated hub models; never written or printed. Default: the environment's own login."""

    trust_remote_code: bool = False
    """Accepted for built-in architectures, where it changes nothing; a model that ships code also needs
    --allow-remote-code on the command line. Default: false."""

    allow_remote_code: bool = False
    """Set by the flag --allow-remote-code only, never by a file. Default: false."""

    flash_attn: Literal["auto", "disabled", "sdpa", "fa2", "fa3"] = "auto"
    """Attention implementation; disabled is eager. One that is not installed falls back to sdpa with a note.
    Default: auto."""

    add_tokens: StrList | None = None
    """Ordinary tokens to add to the vocabulary. Default: none."""

    add_special_tokens: StrList | None = None
    """Special tokens to add to the vocabulary. Default: none."""

    resize_vocab: bool = False
    """Resize embedding and head to the tokenizer's length. Default: false."""

    upcast_layernorm: bool = False
    """Keep normalisation weights in fp32. Default: false."""

    infer_dtype: Literal["auto", "float16", "bfloat16", "float32"] = "auto"
    """Dtype of the model where it is not trained (chat, eval, export). Default: auto, the checkpoint's."""

    train_from_scratch: bool = False
    """Initialise the weights randomly from the model's configuration. Default: false."""

    freeze_trainable_layers: Int = 2
    """freeze: number of last decoder layers that train; negative: the first ones. Default: 2."""

    freeze_trainable_modules: StrList = ["all"]
    """freeze: names of modules inside those layers that train. Default: all."""

    freeze_extra_modules: StrList | None = None
    """freeze: names of modules outside the decoder layers that train too. Default: none."""
