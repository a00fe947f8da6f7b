"""What is recomputed or moved to save memory."""

from __future__ import annotations

from lumen.core import Config


class MemoryConfig(Config):
    """Activation checkpointing."""

    gradient_checkpointing: bool | None = None
    """Recompute each decoder layer in the backward pass: less memory, slower steps. Default: null, on where the
    activations would take more than half of the free memory (LLaMA-Factory: always on)."""

    disable_gradient_checkpointing: bool = False
    """Keep all activations: faster, more memory. Default: false."""
