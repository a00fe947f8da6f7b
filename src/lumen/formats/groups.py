"""Groups: the values that share one scale, as views.

A matrix [N, K] is cut into tiles of R rows and C columns; every granularity is such a cut:

    tensor  R = N, C = K        one scale                 shape []
    row     R = 1, C = K        one per row               shape [N, 1]
    block n R = 1, C = n        one per n neighbours      shape [N, ceil(K/n)]
    tile    R × C               one per tile              shape [ceil(N/R), ceil(K/C)]

Edges are padded with zeros, which change neither the largest magnitude nor a code.  Leading dimensions (a batch, the
experts of a mixture) are kept in front, except that `tensor` shares one scale over everything.  A vector counts as one
row.  The granularity is data; it is never guessed from the number of scales (a 128 × 128 weight has one tile).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from lumen.formats.spec import Granularity


def scale_shape(shape: torch.Size | tuple[int, ...], gran: Granularity) -> tuple[int, ...]:
    """Shape of the scales for a tensor of `shape` (see the table above)."""
    if gran.kind == "tensor":
        return ()
    lead, (rows, cols) = _matrix(shape)
    r, c = _extent(gran, rows, cols)
    grid = (-(-rows // r), -(-cols // c))
    return (*lead, *grid) if len(shape) > 1 else grid[1:]


def to_groups(x: torch.Tensor, gran: Granularity) -> torch.Tensor:
    """x [..., N, K] as tiles [..., N/R, R, K/C, C] (a view where no padding is needed); reduce over (-3, -1)."""
    lead, (rows, cols) = _matrix(x.shape)
    r, c = _extent(gran, rows, cols)
    pad_rows, pad_cols = -rows % r, -cols % c
    x = x.reshape(*lead, rows, cols)
    if pad_rows or pad_cols:
        x = F.pad(x, (0, pad_cols, 0, pad_rows))
    return x.reshape(*lead, (rows + pad_rows) // r, r, (cols + pad_cols) // c, c)


def from_groups(tiles: torch.Tensor, shape: torch.Size | tuple[int, ...]) -> torch.Tensor:
    """The inverse of `to_groups`: drops the padding and restores `shape`."""
    lead, (rows, cols) = _matrix(shape)
    grid_rows, r, grid_cols, c = tiles.shape[-4:]
    full = tiles.reshape(*lead, grid_rows * r, grid_cols * c)
    return full[..., :rows, :cols].reshape(shape)


def group_amax(x: torch.Tensor, gran: Granularity) -> torch.Tensor:
    """Largest magnitude of each group, fp32, shaped like the scales."""
    if x.numel() == 0:
        return torch.zeros(scale_shape(x.shape, gran), dtype=torch.float32, device=x.device)
    if gran.kind == "tensor":
        return x.abs().amax().float()
    if gran.kind == "row":  # no view, no padding: what a compiler fuses into one pass
        return x.abs().amax(dim=-1, keepdim=x.ndim > 1).reshape(scale_shape(x.shape, gran)).float()
    return to_groups(x.abs(), gran).amax(dim=(-3, -1)).reshape(scale_shape(x.shape, gran)).float()


def group_mean_abs(x: torch.Tensor, gran: Granularity) -> torch.Tensor:
    """Mean magnitude of each group, fp32, shaped like the scales; padding does not count."""
    ones = torch.ones_like(x, dtype=torch.float32)
    if gran.kind == "tensor":
        return x.float().abs().mean() if x.numel() else torch.zeros((), device=x.device)
    sums, counts = (to_groups(t, gran).sum(dim=(-3, -1)) for t in (x.float().abs(), ones))
    return (sums / counts.clamp_min(1)).reshape(scale_shape(x.shape, gran))


def flat_blocks(x: torch.Tensor, size: int) -> torch.Tensor:
    """x as [blocks, size] over the flattened tensor, zero-padded: how bitsandbytes cuts a tensor."""
    flat = x.reshape(-1)
    return F.pad(flat, (0, -flat.numel() % size)).reshape(-1, size)


def spread(scale: torch.Tensor, shape: torch.Size | tuple[int, ...], gran: Granularity) -> torch.Tensor:
    """The scale of every value: broadcastable to `shape`."""
    if gran.kind in ("tensor", "row"):
        return scale
    lead, (rows, cols) = _matrix(shape)
    r, c = _extent(gran, rows, cols)
    grid = scale.reshape(*lead, -(-rows // r), 1, -(-cols // c), 1)
    return from_groups(grid.expand(*grid.shape[:-3], r, grid.shape[-2], c), shape)


def _matrix(shape: torch.Size | tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, int]]:
    if len(shape) == 0:
        return (), (1, 1)
    if len(shape) == 1:
        return (), (1, shape[0])
    return tuple(shape[:-2]), (shape[-2], shape[-1])


def _extent(gran: Granularity, rows: int, cols: int) -> tuple[int, int]:
    return max(gran.rows or rows, 1), max(gran.cols or cols, 1)
