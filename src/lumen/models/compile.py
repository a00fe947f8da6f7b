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
from typing import Any, Literal

import torch
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed

from lumen.core.log import note
from lumen.models.attention import use_compiled_attention
from lumen.models.layers import decoder_layers


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


def compile_layers(
    model: nn.Module,
    mode: Literal["auto", "on", "off"] = "auto",
    *,
    steps: int | None = None,
    own_attention: bool = False,
    fixed_length: bool = False,
) -> Callable[[], None]:
    """Compile every decoder layer in place; returns a function that takes it back.

    mode:  off does nothing; on compiles wherever a compiler is; auto also asks whether the run pays it back.
    steps: micro-batches the run will take; None is many.
    own_attention: on a CPU, let `models.attention.use_compiled_attention` replace SDPA, which Inductor cannot fuse.
    fixed_length: every batch has rows of the same number of tokens.

    Parameter names, hooks and state_dict keys do not change (`nn.Module.compile` wraps the call, not the module).
    """
    if mode == "off":
        return lambda: None
    layers = list(decoder_layers(model)[1])
    device = next(model.parameters()).device
    lacking = missing_compiler(device)
    if lacking is not None:
        note(f"decoder layers run uncompiled: {lacking}; the result is the same, slower")
        return lambda: None
    if mode == "auto" and steps is not None and steps < MIN_STEPS:
        note(
            f"decoder layers run uncompiled: {steps} micro-batches would not pay for compiling (compile: on forces it)"
        )
        return lambda: None
    if own_attention and device.type == "cpu":
        long = mode == "on" or steps is None or steps >= BLOCKED_STEPS
        use_compiled_attention(model, fixed_length=fixed_length and long)

    def undo() -> None:
        for layer in layers:
            setattr(layer, "_compiled_call_impl", None)  # noqa: B010  what nn.Module.compile sets, and nothing unsets

    def give_up(error: Exception) -> None:
        undo()
        lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
        reason = lines[min(1, len(lines) - 1)][:200]  # the first only names the backend
        note(f"decoder layers run uncompiled: the compiler failed ({reason}); the result is the same, slower")

    for layer in layers:
        layer.compile()
        _guard(layer, give_up, first=layer is layers[0])

    return undo


def _guard(layer: nn.Module, give_up: Callable[[Exception], None], *, first: bool) -> None:
    """Go on uncompiled where compiling fails: a broken compiler, a full disk, a cache that a kill left half-written.

    Behind frozen embeddings the first layer's input needs no gradient while every other layer's does, which would
    compile two graphs.  So it is made to need one: a few products more in one layer, half the time to compile.
    """
    compiled: Callable[..., Any] = layer._compiled_call_impl  # type: ignore[assignment]

    def call(*args: Any, **kwargs: Any) -> Any:
        if first and torch.is_grad_enabled() and args and torch.is_tensor(args[0]) and not args[0].requires_grad:
            args = (args[0].detach().requires_grad_(), *args[1:])
        try:
            return compiled(*args, **kwargs)
        except BackendCompilerFailed as error:
            give_up(error)
            return layer(*args, **kwargs)

    setattr(layer, "_compiled_call_impl", call)  # noqa: B010


BLOCKED_STEPS = 150
"""Under `auto`, micro-batches from which unrolled blocks of attention pay back their longer compiling.  An estimate: a
layer was about 10 % faster in one loaded measurement; the break-even itself was not measured."""

MIN_STEPS = 30
"""Fewer micro-batches than this are taken not to pay back compiling under `auto`; an estimate, not measured."""
