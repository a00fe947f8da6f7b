"""What the numeric tests measure with."""

from __future__ import annotations

import torch


def gaussian(*shape: int, seed: int = 0) -> torch.Tensor:
    """fp32 N(0, 1)."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def outliers(x: torch.Tensor) -> torch.Tensor:
    """The same with one channel (column) in 256 scaled by 30."""
    x = x.clone()
    x[:, ::256] *= 30
    return x


def sqnr(exact: torch.Tensor, approximate: torch.Tensor) -> float:
    """Signal over quantisation noise, in dB."""
    noise = (approximate.double() - exact.double()).square().sum()
    return float(10 * torch.log10(exact.double().square().sum() / noise))
