"""What is recomputed or moved to save memory."""

from __future__ import annotations

from lumen.core import Config


class MemoryConfig(Config):
    """Activation checkpointing."""

    gradient_checkpointing: bool | None = None
    """Recompute each decoder layer in the backward pass. Default: null, which is on unless
    disable_gradient_checkpointing."""

    disable_gradient_checkpointing: bool = False
    """Keep all activations: faster, more memory. Default: false."""
