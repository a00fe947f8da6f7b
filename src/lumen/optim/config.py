"""The optimizer's part of the flat configuration."""

from __future__ import annotations

from lumen.core import Config, Float


class OptimConfig(Config):
    """AdamW and its settings (HF names and defaults)."""

    optim: str = "adamw_torch"
    """adamw_torch (also adamw, adamw_torch_fused, adamw_hf: the same numbers) or sgd. Default: adamw_torch."""

    learning_rate: Float = 5e-5
    """Peak learning rate. Default: 5e-5."""

    weight_decay: Float = 0.0
    """Decoupled decay per unit of learning rate; norms and biases have none. Default: 0."""

    adam_beta1: Float = 0.9
    """Decay of the first moment. Default: 0.9."""

    adam_beta2: Float = 0.999
    """Decay of the second moment. Default: 0.999."""

    adam_epsilon: Float = 1e-8
    """Added to the denominator. Default: 1e-8."""

    max_grad_norm: Float = 1.0
    """Clip the global gradient norm to this; 0: do not clip. Default: 1."""

    loraplus_lr_ratio: Float | None = None
    """LoRA+: learning rate of B over that of A. Default: null, equal."""

    loraplus_lr_embedding: Float = 1e-6
    """LoRA+: learning rate of adapted embeddings. Default: 1e-6."""
