"""Codebooks learned from a tensor: weighted k-means in one dimension.

Minimise Σ w_i (x_i - c_{a(i)})² over the values c and the assignment a.  In one dimension a cluster is an interval of
the sorted values, its best centre is its weighted mean, and with running sums of w and w·x each interval's cost is one
subtraction: Σ w x² is the same for every partition, so the best is the one with the largest Σ_clusters (Σ w x)² / Σ w.

1. The sorted values are cut into at most 512 bins, half of them of equal mass, half of equal width, and dynamic
   programming finds the best partition that does not cut a bin (the best of all where there are fewer values).
2. Lloyd's iteration on the values themselves moves the 15 boundaries to the midpoints between neighbouring centres,
   and the centres to the means, until nothing moves.  Alone it may stop a third above the optimum.

The weight of a value is the square of its block's scale (the error is scaled back by it), times, where given, how
strongly the model's output depends on it: the mean square of the input channel it multiplies (activation-aware).
"""

from __future__ import annotations

import torch

ENTRIES = 16
_ITERATIONS = 40
_BINS = 256


def kmeans(x: torch.Tensor, weights: torch.Tensor, entries: int = ENTRIES) -> torch.Tensor:
    """x, weights [n] → ascending centres fp32 [entries]; entries without values of their own repeat a centre."""
    order = torch.argsort(x.reshape(-1))
    values, mass = x.reshape(-1)[order].double(), weights.reshape(-1)[order].double()
    if values.numel() == 0 or mass.sum() == 0:
        return torch.linspace(-1, 1, entries, device=x.device)
    zero = mass.new_zeros(1)
    sum_w, sum_wx = torch.cat([zero, mass.cumsum(0)]), torch.cat([zero, (mass * values).cumsum(0)])
    edges = _partition(sum_w, sum_wx, _bins(values, sum_w), entries)
    centres = values[edges[:-1].clamp_max(values.numel() - 1)]
    for _ in range(_ITERATIONS):
        w, wx = sum_w[edges].diff(), sum_wx[edges].diff()
        moved = torch.where(w > 0, wx / w.clamp_min(1e-300), centres)
        if torch.equal(moved, centres):
            break
        centres = moved.sort().values
        cuts = torch.searchsorted(values, (centres[1:] + centres[:-1]) / 2)
        edges = torch.cat([cuts.new_zeros(1), cuts, cuts.new_full((1,), values.numel())])
    return centres.float()


def _bins(values: torch.Tensor, sum_w: torch.Tensor) -> torch.Tensor:
    """Edges of the bins, as positions in the sorted values: ascending int64, from 0 to n."""
    steps = torch.linspace(0, 1, _BINS + 1, device=values.device, dtype=torch.float64)
    if values.numel() <= 2 * _BINS:
        return torch.arange(values.numel() + 1, device=values.device)
    by_mass = torch.searchsorted(sum_w, steps * sum_w[-1])
    by_width = torch.searchsorted(values, values[0] + steps * (values[-1] - values[0]))
    ends = torch.tensor([0, values.numel()], device=values.device)
    return torch.cat([by_mass, by_width, ends]).clamp(0, values.numel()).unique()


def _partition(sum_w: torch.Tensor, sum_wx: torch.Tensor, bins: torch.Tensor, entries: int) -> torch.Tensor:
    """The best cut of the bins into `entries` intervals, some maybe empty → their edges (positions) [entries + 1]."""
    w = sum_w[bins][None, :] - sum_w[bins][:, None]
    wx = sum_wx[bins][None, :] - sum_wx[bins][:, None]
    gain = torch.where(w > 0, wx.square() / w.clamp_min(1e-300), 0.0)  # of the interval [row, column)
    gain = torch.where(torch.arange(len(bins), device=w.device)[:, None] <= torch.arange(len(bins), device=w.device),
                       gain, -torch.inf)  # fmt: skip
    best, chosen = gain[0], []
    for _ in range(entries - 1):
        best, at = (best[:, None] + gain).max(0)
        chosen.append(at)
    edges = [len(bins) - 1]
    for at in reversed(chosen):
        edges.append(int(at[edges[-1]]))
    return bins[torch.tensor([0, *reversed(edges)], device=bins.device)]


def learn_codebook(units: torch.Tensor, absmax: torch.Tensor, importance: torch.Tensor | None = None) -> torch.Tensor:
    """units [blocks, size] in [-1, 1] with their absmax [blocks] → 16 values.

    importance: a weight for every value of the tensor [numel], or None for equal ones.
    """
    top = absmax.nan_to_num().amax().clamp_min(1e-38) if absmax.numel() else absmax.new_ones(())
    weights = (absmax / top).square()[:, None].expand_as(units).contiguous()  # only their ratios matter
    if importance is not None:
        flat = weights.reshape(-1)
        flat[: importance.numel()] *= importance.reshape(-1).to(flat)
    finite = torch.isfinite(units) & torch.isfinite(weights)
    return kmeans(torch.where(finite, units, 0.0), torch.where(finite, weights, 0.0))
