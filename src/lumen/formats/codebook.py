"""Codebooks learned from a tensor: weighted k-means in one dimension (Lloyd's algorithm on sorted values).

Minimise Σ w_i (x_i - c_{a(i)})² over the values c and the assignment a.  In one dimension a cluster is an interval, so
an assignment is 15 boundaries, the midpoints between neighbouring centres, and with running sums of w and w·x over the
sorted values each iteration is a binary search and 16 differences.  The weight of a value is the square of its block's
scale (the error is scaled back by it), times, where given, how strongly the model's output depends on it: the mean
square of the input channel it multiplies (activation-aware).
"""

from __future__ import annotations

import torch

ENTRIES = 16
_ITERATIONS = 40


def kmeans(x: torch.Tensor, weights: torch.Tensor, entries: int = ENTRIES) -> torch.Tensor:
    """x, weights [n] → ascending centres fp32 [entries].  Starts at the quantiles of the weighted distribution."""
    order = torch.argsort(x.reshape(-1))
    values, mass = x.reshape(-1)[order].double(), weights.reshape(-1)[order].double()
    if values.numel() == 0 or mass.sum() == 0:
        return torch.linspace(-1, 1, entries, device=x.device)
    zero = mass.new_zeros(1)
    sum_w, sum_wx = torch.cat([zero, mass.cumsum(0)]), torch.cat([zero, (mass * values).cumsum(0)])
    targets = (torch.arange(entries, device=x.device, dtype=torch.float64) + 0.5) / entries * sum_w[-1]
    centres = values[torch.searchsorted(sum_w[1:], targets).clamp_max(values.numel() - 1)]
    for _ in range(_ITERATIONS):
        cuts = torch.searchsorted(values, (centres[1:] + centres[:-1]) / 2)
        edges = torch.cat([cuts.new_zeros(1), cuts, cuts.new_full((1,), values.numel())])
        w, wx = sum_w[edges].diff(), sum_wx[edges].diff()
        moved = torch.where(w > 0, wx / w.clamp_min(1e-300), centres)
        if torch.equal(moved, centres):
            break
        centres = moved
    return centres.sort().values.float()


def learn_codebook(units: torch.Tensor, absmax: torch.Tensor, importance: torch.Tensor | None = None) -> torch.Tensor:
    """units [blocks, size] in [-1, 1] with their absmax [blocks] → 16 values.

    importance: a weight for every value of the tensor [numel], or None for equal ones.
    """
    weights = absmax.square()[:, None].expand_as(units).contiguous()
    if importance is not None:
        flat = weights.reshape(-1)
        flat[: importance.numel()] *= importance.reshape(-1).to(flat)
    finite = torch.isfinite(units) & torch.isfinite(weights)
    return kmeans(torch.where(finite, units, 0.0), torch.where(finite, weights, 0.0))
