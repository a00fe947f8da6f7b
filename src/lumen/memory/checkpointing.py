"""Activation checkpointing: keep a decoder layer's input, recompute the rest in the backward pass.

A layer keeps about 16 d + 5 f values a token for its backward pass (d hidden size, f width of the MLP: inputs of seven
products, two norms, the gate and what attention keeps).  Checkpointing keeps d, and pays with one more forward pass:
about a quarter to a third of the step.  So it is worth its price only where memory is short.

`auto` compares the estimate with the memory that is free: it switches on where activations would take more than half of
it.  LLaMA-Factory switches it on always; with `gradient_checkpointing: true` so do we.

The recomputation is the non-reentrant one: it works when no input of the first layer requires a gradient (frozen
embeddings under LoRA, where the reentrant kind silently trains nothing), and it replays the random state, so dropout
draws the same mask twice and a resumed run stays bit-equal.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from lumen.core.errors import ConfigError
from lumen.memory.config import MemoryConfig


@dataclass
class Checkpointing:
    """on: whether layers are recomputed.  why: in words.  activation_bytes: estimated without it, for a micro-batch."""

    on: bool
    why: str
    activation_bytes: int


def activation_bytes(model: Any, tokens: int) -> int:
    """Estimated bytes that all decoder layers keep for the backward pass of `tokens` tokens, without checkpointing."""
    config = model.config.get_text_config()
    hidden = int(getattr(config, "hidden_size", 0) or getattr(config, "n_embd", 0))
    layers = int(getattr(config, "num_hidden_layers", 0) or getattr(config, "n_layer", 0))
    width = int(getattr(config, "intermediate_size", None) or getattr(config, "n_inner", None) or 4 * hidden)
    size = torch.empty((), dtype=model.dtype).element_size()
    return layers * tokens * (16 * hidden + 5 * width) * size


def free_bytes(device: torch.device) -> int:
    """Memory that is free on the device, bytes; 0 where unknown."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        from pathlib import Path

        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return 0


def choose(config: MemoryConfig, model: Any, *, tokens: int, free: int | None = None) -> Checkpointing:
    """Whether to checkpoint.  tokens: of a micro-batch.  free: bytes; default asks the device."""
    needed = activation_bytes(model, tokens)
    if config.gradient_checkpointing and config.disable_gradient_checkpointing:
        raise ConfigError(
            "gradient_checkpointing and disable_gradient_checkpointing are both set",
            where="gradient_checkpointing, disable_gradient_checkpointing",
            fix="keep one of them",
        )
    if config.disable_gradient_checkpointing or config.gradient_checkpointing is False:
        return Checkpointing(False, "switched off by the configuration", needed)
    if config.gradient_checkpointing:
        return Checkpointing(True, "switched on by the configuration", needed)
    free = free_bytes(next(model.parameters()).device) if free is None else free
    shown = f"activations take about {needed / 1e9:.1f} GB of {free / 1e9:.1f} GB that are free"
    return Checkpointing(bool(free) and needed > free / 2, shown, needed)


def apply_checkpointing(model: Any, config: MemoryConfig, *, tokens: int) -> Checkpointing:
    """Wrap the decoder layers where that was chosen or is needed; returns what was done and why.

    Raises ConfigError where the architecture cannot and it was asked for.
    """
    chosen = choose(config, model, tokens=tokens)
    if not chosen.on:
        return chosen
    bare = model.get_base_model() if hasattr(model, "peft_config") else model
    try:
        bare.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    except ValueError as error:
        if config.gradient_checkpointing:
            raise ConfigError(
                f"{type(bare).__name__} does not support gradient checkpointing",
                where="gradient_checkpointing",
                fix="set disable_gradient_checkpointing: true",
            ) from error
        return Checkpointing(False, f"{type(bare).__name__} does not support it", chosen.activation_bytes)
    return chosen
