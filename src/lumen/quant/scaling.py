"""Scales that come from the past: delayed and static scaling.

A dynamic scale needs the tensor's largest magnitude (amax) before its first code: two passes over memory.  A *delayed*
scale is computed from the amax of earlier steps, so one pass quantises and measures at once.  A *static* scale is
measured once and then kept.

    scale = amax of the history / largest code · 2^margin          (the history's maximum, or its newest entry)

What a step sees is collected beside the history (`amax_now`, the maximum over its micro-batches) and becomes the
history's newest entry when an optimizer of the process has stepped.  From this order the rules of NUMERICS follow:

- a scale never knows the tensor it is used for, unless the history is empty: then the tensor's own amax is used;
- within a step nothing changes, so the recomputation under checkpointing uses its forward's scale, and since a maximum
  counts a tensor once however often it is seen, recomputing, or repeating a step that was dropped, pollutes nothing;
- evaluation (`model.eval()`) collects nothing;
- an amax of zero, NaN or infinity is never an entry: the scale stays as it was.  The tensor itself comes out as NaN
  where it was not finite, for the trainer's guard to see: a clamp would hide the overflow.

Values beyond a scale that has become too small are clamped to the largest code.  Each layer keeps one history per role
(weight, input, grad_output) as buffers, so state_dict and Lumen's checkpoints hold them.  A frozen weight is quantised
once with its own amax.  With `reduce` the entries are the maximum over all ranks: one all-reduce per step for all
tensors.  Source: FP8 formats for deep learning (arXiv 2209.05433), as practised by delayed-scaling recipes.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from lumen.core import QuantError
from lumen.formats import QuantSpec
from lumen.formats.floats import GRIDS
from lumen.formats.integer import MAX
from lumen.formats.scales import absmax_scale
from lumen.quant.modules import plain_name

ALGORITHMS = ("max", "most_recent")
HISTORY_ROLES = ("weight", "input", "grad_output")
BUFFERS = ("amax_history", "amax_now")


@dataclass(frozen=True)
class Delayed:
    """history: steps that are remembered.  margin: powers of two of headroom.  algorithm: `max` or `most_recent`.
    reduce: whether entries are the maximum over all ranks."""

    history: int = 1024
    margin: int = 0
    algorithm: str = "max"
    reduce: bool = False

    def __post_init__(self) -> None:
        if self.history < 1:
            raise QuantError(f"a history of {self.history} steps remembers nothing", where="quant.delayed.history")
        if self.algorithm not in ALGORITHMS:
            raise QuantError(
                f"there is no algorithm {self.algorithm!r}",
                where="quant.delayed.algorithm",
                fix=f"one of {', '.join(ALGORITHMS)}",
            )


DEFAULT = Delayed()


def largest(spec: QuantSpec) -> float:
    """The largest code of a format with one scale per tensor."""
    return float(MAX[spec.element]) if spec.element in MAX else GRIDS[spec.element, spec.dialect].max


def held_scale(
    x: torch.Tensor,
    spec: QuantSpec,
    role: str,
    options: Delayed,
    history: torch.Tensor | None,
    now: torch.Tensor | None,
) -> torch.Tensor:
    """fp32 [] scale of x by its history [3, H]; collects x's amax in `now` [3] where that is given.

    Without a history (a frozen weight, quantised once) x's own amax is used.
    """
    index = HISTORY_ROLES.index("input" if role == "saved_input" else role)
    zero = torch.zeros((), dtype=torch.float32, device=x.device)
    amax = x.detach().abs().amax().float() if x.numel() else zero
    finite = torch.isfinite(amax)
    used = amax
    if history is not None:
        past = history[index].amax() if options.algorithm == "max" else history[index, 0]
        used = torch.where(past > 0, past, amax)
    if now is not None:
        now[index].copy_(torch.maximum(now[index], torch.where(finite, amax, zero)))
    scale = absmax_scale(used, largest(spec), rule=spec.rule) * 2.0**options.margin
    return torch.where(finite, scale, torch.nan)


def pushed(history: torch.Tensor, now: torch.Tensor, static: torch.Tensor) -> torch.Tensor:
    """The history [3, H] with what a step saw [3] as its newest entries.

    static: bool [3], roles that keep their first entry.
    """
    shifted = torch.cat([now[:, None], history[:, :-1]], 1)
    valid = (now > 0) & torch.isfinite(now) & ~(static & (history[:, 0] > 0))
    return torch.where(valid[:, None], shifted, history)


_tracked: list[weakref.ref[nn.Module]] = []


def track(layer: nn.Module) -> None:
    """From now on an optimizer's step ends a step of this layer's histories."""
    _tracked[:] = [ref for ref in _tracked if ref() is not None]
    if all(ref() is not layer for ref in _tracked):
        _tracked.append(weakref.ref(layer))


def _layers(modules: Iterable[nn.Module]) -> list[Any]:
    return [m for m in modules if BUFFERS[0] in m._buffers]


@torch.no_grad()
def push(modules: Iterable[nn.Module]) -> None:
    """End a step: what was collected becomes the newest entries.  One collective for all layers that reduce."""
    layers = _layers(modules)
    if not layers:
        return
    reducing = [layer for layer in layers if layer.plan.delayed.reduce]
    if reducing and torch.distributed.is_available() and torch.distributed.is_initialized():
        all_now = torch.stack([layer.amax_now for layer in reducing])
        torch.distributed.all_reduce(all_now, op=torch.distributed.ReduceOp.MAX)
        for layer, now in zip(reducing, all_now, strict=True):
            layer.amax_now.copy_(now)
    for layer in layers:
        static = torch.tensor(layer.plan.static_roles, device=layer.amax_now.device)
        # new tensors: a graph that is not backward yet keeps the scale of its forward
        layer.amax_history = pushed(layer.amax_history, layer.amax_now, static)
        layer.amax_now = torch.zeros_like(layer.amax_now)


def _after_step(*_: Any) -> None:
    push(layer for ref in list(_tracked) if (layer := ref()) is not None)


register_optimizer_step_post_hook(_after_step)


@contextmanager
def calibrating(model: nn.Module) -> Iterator[None]:
    """Forward (and backward) passes inside collect amax in any mode; at the end they become entries.

    This is how a static scale is measured before training; without it, it is what the first optimizer step saw.
    """
    layers = _layers(model.modules())
    if not layers:
        raise QuantError("no layer of this model has delayed or static scales", fix="quantise it with such a recipe")
    for layer in layers:
        layer.calibrating = True
    try:
        yield
    finally:
        for layer in layers:
            layer.calibrating = False
        push(layers)


@torch.no_grad()
def give_amax(model: nn.Module, values: Mapping[str, Mapping[str, float]]) -> None:
    """Set the newest entries by hand: plain module name → role → amax.  Raises QuantError for what does not exist."""
    layers = {plain_name(path): m for path, m in model.named_modules() if BUFFERS[0] in m._buffers}
    for name, roles in values.items():
        if name not in layers:
            raise QuantError(f"no layer {name!r} has delayed or static scales", fix=f"layers: {', '.join(layers)}")
        for role, amax in roles.items():
            if role not in HISTORY_ROLES or not 0 < amax < float("inf"):
                raise QuantError(f"{role}: {amax} is no positive amax of a role", fix=", ".join(HISTORY_ROLES))
            history = layers[name].get_buffer(BUFFERS[0])
            history[HISTORY_ROLES.index(role), 0] = amax


def histories(model: nn.Module) -> dict[str, torch.Tensor]:
    """Buffer name → tensor of every history, for a checkpoint."""
    return {
        f"{path}.{name}" if path else name: module.get_buffer(name)
        for path, module in model.named_modules()
        if BUFFERS[0] in module._buffers
        for name in BUFFERS
    }


@torch.no_grad()
def load_histories(model: nn.Module, saved: Mapping[str, torch.Tensor]) -> None:
    """Put back what `histories` gave; a layer that the checkpoint does not know keeps its own."""
    for path, module in model.named_modules():
        for name in BUFFERS if BUFFERS[0] in module._buffers else ():
            key = f"{path}.{name}" if path else name
            if key in saved:
                module._buffers[name] = fitted(saved[key], module.get_buffer(name))


def fitted(saved: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A saved history in the length of another: the newest entries are kept."""
    saved = saved.to(like.device, like.dtype)
    if saved.ndim < 2 or saved.shape[-1] == like.shape[-1]:
        return saved.clone()
    out = torch.zeros_like(like)
    count = min(saved.shape[-1], like.shape[-1])
    out[..., :count] = saved[..., :count]
    return out
