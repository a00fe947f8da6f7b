"""Activation checkpointing: keep a decoder layer's input, recompute the rest in the backward pass.

A layer keeps some fifteen times its input for the backward pass: the inputs of seven products, two norms, the gate,
what attention needs.  Checkpointing keeps the input and pays with one more forward pass, a quarter to a third of the
step.  So it is worth its price only where memory is short, and `auto` asks: it switches on where the activations of
one micro-batch would take more than half of the memory that is free.  (LLaMA-Factory switches it on always;
`gradient_checkpointing: true` does here too.)

The recomputation is the non-reentrant one.  It works when no input of the first layer requires a gradient (frozen
embeddings under LoRA, where the reentrant kind trains nothing without saying so), and it replays the random state, so
dropout draws the same mask twice and a resumed run stays bit-equal.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lumen.core.errors import ConfigError
from lumen.memory.config import MemoryConfig

SHARE = 0.5
"""Part of the free memory that activations may take before `auto` recomputes them; the rest is for everything else."""


@dataclass
class Checkpointing:
    """on: whether layers are recomputed.  why: in words."""

    on: bool
    why: str


def free_bytes(device: torch.device) -> int:
    """Memory that is free on the device, bytes; 0 where unknown."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return 0


def choose(config: MemoryConfig, activations: Callable[[], int], free: int) -> Checkpointing:
    """Whether to checkpoint.

    activations: estimates the bytes that a micro-batch keeps without checkpointing; called only where it decides.
    free: bytes; 0 where unknown.
    """
    if config.gradient_checkpointing and config.disable_gradient_checkpointing:
        raise ConfigError(
            "gradient_checkpointing and disable_gradient_checkpointing are both set",
            where="gradient_checkpointing, disable_gradient_checkpointing",
            fix="keep one of them",
        )
    if config.disable_gradient_checkpointing or config.gradient_checkpointing is False:
        return Checkpointing(False, "switched off by the configuration")
    if config.gradient_checkpointing:
        return Checkpointing(True, "switched on by the configuration")
    if not free:
        return Checkpointing(False, "how much memory is free is not known")
    needed = activations()
    shown = f"activations take about {needed / 1e9:.1f} of {free / 1e9:.1f} GB that are free"
    return Checkpointing(needed > SHARE * free, shown)


def apply_checkpointing(model: Any, config: MemoryConfig, activations: Callable[[], int]) -> Checkpointing:
    """Wrap the decoder layers where that was chosen or is needed; returns what was done and why.

    activations: as in `choose`.
    Raises ConfigError where the architecture cannot and it was asked for.
    """
    chosen = choose(config, activations, free_bytes(next(model.parameters()).device))
    if not chosen.on:
        return chosen
    bare = model.get_base_model() if hasattr(model, "peft_config") else model
    try:
        if hasattr(bare, "activation_checkpointing_enable"):  # transformers' newer name
            bare.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
        else:
            bare.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    except ValueError as error:
        if config.gradient_checkpointing:
            raise ConfigError(
                f"{type(bare).__name__} does not support gradient checkpointing",
                where="gradient_checkpointing",
                fix="set disable_gradient_checkpointing: true",
            ) from error
        return Checkpointing(False, f"{type(bare).__name__} does not support it")
    return chosen
