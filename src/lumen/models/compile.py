"""Compile per decoder layer: the same arithmetic in fewer passes over memory.

Between its matrix products a decoder layer is element-wise work (norms, rotary positions, SwiGLU, residuals, softmax)
that eager torch runs one operation at a time, each a trip through memory.  Inductor fuses those trips.  Compiling layer
by layer instead of the whole model compiles once for all layers (they share one graph), keeps hooks, gradient
checkpointing and PEFT's wrappers outside the graph boundary, and costs seconds instead of minutes.

On a CPU Inductor writes C++, on a GPU Triton.  Where that compiler is missing the layers run as they are, with the same
result: one line says so.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from typing import Literal

import torch
from torch import nn

from lumen.core.log import note


def missing_compiler(device: torch.device | str) -> str | None:
    """What Inductor lacks on this device, in words; None where it can compile."""
    if torch.device(device).type == "cpu":
        names = [os.environ.get("CXX"), "g++", "clang++", "c++"]
        if not any(name and shutil.which(name) for name in names):
            return "no C++ compiler (g++ or clang++)"
        return None
    try:
        import triton  # noqa: F401
    except ImportError:
        return "no Triton"
    return None


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The decoder layers in order: the members of the model's longest ModuleList of modules of one class."""
    best: list[nn.Module] = []
    for module in model.modules():
        if isinstance(module, nn.ModuleList):
            members = list(module)
            if len(members) > len(best) and len({type(m) for m in members}) == 1 and _is_layer(members[0]):
                best = members
    return best


def _is_layer(module: nn.Module) -> bool:
    return any(isinstance(child, nn.Linear) or "attn" in name for name, child in module.named_modules())


def compile_layers(
    model: nn.Module, mode: Literal["auto", "on", "off"] = "auto", *, steps: int | None = None
) -> Callable[[], None]:
    """Compile every decoder layer in place; returns a function that takes it back.

    mode:  off does nothing; on compiles wherever a compiler is; auto also asks whether the run pays it back.
    steps: optimizer steps the run will take; None is many.

    Parameter names, hooks and state_dict keys do not change (`nn.Module.compile` wraps the call, not the module).
    """
    layers = decoder_layers(model)
    if mode == "off" or not layers:
        return lambda: None
    lacking = missing_compiler(next(model.parameters()).device)
    if lacking is not None:
        note(f"decoder layers run uncompiled: {lacking}; the result is the same, slower")
        return lambda: None
    if mode == "auto" and steps is not None and steps < MIN_STEPS:
        note(f"decoder layers run uncompiled: {steps} steps would not pay for compiling (compile: on forces it)")
        return lambda: None
    for layer in layers:
        layer.compile()

    def undo() -> None:
        for layer in layers:
            setattr(layer, "_compiled_call_impl", None)  # noqa: B010  what nn.Module.compile sets, and nothing unsets

    return undo


MIN_STEPS = 30
"""Fewer optimizer steps than this do not pay back compiling under `auto`."""
