"""The optimizer's part of the flat configuration."""

from __future__ import annotations

from lumen.core import Config, NonNegative, Positive, Share


class OptimConfig(Config):
    """AdamW and its settings (HF names and defaults)."""

    optim: str = "adamw_torch"
    """adamw_torch (also adamw, adamw_torch_fused, adamw_hf: the same numbers) or sgd. Default: adamw_torch."""

    learning_rate: NonNegative = 5e-5
    """Peak learning rate. Default: 5e-5."""

    weight_decay: NonNegative = 0.0
    """Decoupled decay per unit of learning rate; norms and biases have none. Default: 0."""

    adam_beta1: Share = 0.9
    """Decay of the first moment. Default: 0.9."""

    adam_beta2: Share = 0.999
    """Decay of the second moment. Default: 0.999."""

    adam_epsilon: NonNegative = 1e-8
    """Added to the denominator. Default: 1e-8."""

    max_grad_norm: NonNegative = 1.0
    """Clip the global gradient norm to this; 0: do not clip. Default: 1."""

    loraplus_lr_ratio: Positive | None = None
    """LoRA+: learning rate of B over that of A. Default: null, equal."""

    loraplus_lr_embedding: NonNegative = 1e-6
    """LoRA+: learning rate of adapted embeddings. Default: 1e-6."""
