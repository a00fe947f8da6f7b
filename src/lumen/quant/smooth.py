"""SmoothQuant: move outliers from the input, where they hurt, into the weight, where they do not.

A few channels of an LLM's activations are a hundred times the rest, and a scale per row is theirs: everything else is
left with a handful of codes.  Weights have no such channels.  With s[k] > 0 per input channel

    y = x · Wᵀ = (x / s) · (W · s)ᵀ,        s[k] = max|x[:, k]|^α / max|W[:, k]|^(1 - α)

both factors can be given an ordinary range; α = 0.7 leaves more of the difficulty to the weight.  W·s is folded into
the stored codes (or into each quantisation of a master), x is divided before it is quantised.  dgrad with the stored
codes gives dx·s and is divided by s; where each channel has its own scale anyway (wgrad, dgrad from a master) s cancels
and is left out.

s is measured before the first step and then kept: it is a buffer, `smooth`, and part of every checkpoint.

**Groups.**  Some layers (down_proj, whose input is a product of two activations) have outliers in single values too.
There the sum over K is cut into groups with a scale each: Σ_g sx[m, g] · sw[n, g] · (integer product over g).  A layer
gets the largest group whose measured output error on the calibration rows reaches `target_db`; most need none.  35 dB
parts them on SmolLM2-135M: smoothed, down_proj has 32 to 33 without groups and 36 in groups of 192, all other layers
have 35 to 42 (docs/quantisation.md).

Source: SmoothQuant (arXiv 2211.10438).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from lumen.core import QuantError
from lumen.quant.gemm import through
from lumen.quant.modules import plain_name
from lumen.quant.plan import LayerPlan, Smoothing, is_int8

GROUPS = (512, 384, 256, 192, 128, 96, 64, 32)
SAMPLE_ROWS = 256


def factors(input_amax: torch.Tensor, weight: torch.Tensor, alpha: float) -> torch.Tensor:
    """fp32 s [K] from the inputs' largest magnitudes [K] and W [N, K]; 1 where a channel is dead."""
    x, w = input_amax.float(), weight.detach().abs().amax(0).float()
    s = x.pow(alpha) / w.pow(1 - alpha)
    return torch.where((x > 0) & (w > 0) & torch.isfinite(s) & (s > 0), s, torch.ones_like(s))


def output_db(weight: torch.Tensor, s: torch.Tensor, rows: torch.Tensor, plan: LayerPlan) -> float:
    """SQNR in dB of forward's product on these rows [M, K] with the plan's (settled) specs."""
    x, w = rows.float(), weight.detach().float()
    exact = x @ w.t()
    left, right = (
        through(t, spec, 1, torch.float32) for t, spec in ((x / s, plan.forward.left), (w * s, plan.forward.right))
    )
    noise = (left @ right.t() - exact).square().sum()
    return float(10 * torch.log10(exact.square().sum() / noise.clamp_min(1e-30)))


def choose_group(weight: torch.Tensor, s: torch.Tensor, rows: torch.Tensor, plan: LayerPlan) -> int:
    """Size of the groups along K that forward needs; 0 for none."""
    if not (is_int8(plan.forward.left) and is_int8(plan.forward.right)):
        return 0
    found = {0: output_db(weight, s, rows, plan.settled(0))}
    if found[0] >= plan.smoothing.target_db:
        return 0
    for size in (g for g in GROUPS if weight.shape[1] % g == 0 and g < weight.shape[1]):
        found[size] = output_db(weight, s, rows, plan.settled(size))
        if found[size] >= plan.smoothing.target_db:
            return size
    return max(found, key=lambda size: found[size])


class Observer:
    """What calibration keeps of one layer's inputs: the largest magnitude per channel, and some rows."""

    def __init__(self) -> None:
        self.amax: torch.Tensor | None = None
        self.rows: list[torch.Tensor] = []

    @torch.no_grad()
    def see(self, x: torch.Tensor) -> None:
        """x [M, K]."""
        if not x.shape[0]:
            return
        amax = x.detach().abs().amax(0).float()
        self.amax = amax if self.amax is None else torch.maximum(self.amax, amax)
        held = sum(rows.shape[0] for rows in self.rows)
        if held < SAMPLE_ROWS:
            step = max(1, x.shape[0] // 64)
            self.rows.append(x.detach()[::step][: SAMPLE_ROWS - held].float())

    def measure(self, weight: torch.Tensor, plan: LayerPlan) -> tuple[torch.Tensor, int]:
        """s [K] and the size of groups (0: none); alike on every rank."""
        assert self.amax is not None
        ranks = torch.distributed.is_available() and torch.distributed.is_initialized()
        if ranks:
            torch.distributed.all_reduce(self.amax, op=torch.distributed.ReduceOp.MAX)
        s = factors(self.amax, weight, plan.smoothing.alpha)
        group = choose_group(weight, s, torch.cat(self.rows), plan)
        if ranks:
            size = torch.tensor(group or weight.shape[1], device=s.device)
            torch.distributed.all_reduce(size, op=torch.distributed.ReduceOp.MIN)
            group = int(size) % weight.shape[1]
        return s, group


def waiting(model: nn.Module) -> dict[str, Any]:
    """Plain name → layer that has not been calibrated."""
    return {plain_name(path): m for path, m in model.named_modules() if getattr(m, "pending", None) is not None}


@torch.no_grad()
def calibrate(model: nn.Module, batches: Iterable[Any], run: Callable[[Any], Any] | None = None) -> None:
    """Measure every layer that waits on these batches, all of them in high precision, then quantise.

    batches: keyword arguments of the model's forward (`{"input_ids": …}`), or whatever `run` takes.
    Raises QuantError where a layer saw no input.
    """
    layers = waiting(model)
    observers = {name: Observer() for name in layers}
    was_training = model.training
    model.eval()
    try:
        for name, layer in layers.items():
            layer.observer = observers[name]
        for batch in batches:
            run(batch) if run is not None else model(**batch)
    finally:
        model.train(was_training)
        for layer in layers.values():
            layer.observer = None
    for name, layer in layers.items():
        if observers[name].amax is None:
            raise QuantError("this layer saw no input during calibration", where=name, fix="give it more batches")
        layer.settle(*observers[name].measure(layer.weight, layer.pending))


def smoothings(model: nn.Module) -> dict[str, torch.Tensor]:
    """`NAME.smooth` [K] and `NAME.smooth_group` [] of every calibrated layer by plain name, for a checkpoint."""
    return {
        f"{plain_name(path)}.{buffer}": module.get_buffer(buffer)
        for path, module in model.named_modules()
        if "smooth" in module._buffers
        for buffer in ("smooth", "smooth_group")
    }


@torch.no_grad()
def restore(model: nn.Module, saved: Mapping[str, torch.Tensor]) -> None:
    """Quantise the layers that wait as a checkpoint says, instead of calibrating them."""
    for name, layer in waiting(model).items():
        if f"{name}.smooth" in saved:
            layer.settle(saved[f"{name}.smooth"], int(saved[f"{name}.smooth_group"]))


__all__ = ["Smoothing", "calibrate", "choose_group", "factors", "restore", "smoothings", "waiting"]
