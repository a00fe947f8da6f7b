"""What the numeric figures are measured with: fixed test tensors and a few measures, all without any format in them."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from lumen.formats import Noise, QuantSpec, decode, encode


def gaussian(*shape: int, seed: int = 0) -> torch.Tensor:
    """fp32 N(0, 1), the same at every call."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def outliers(x: torch.Tensor) -> torch.Tensor:
    """x [N, K] with one channel (column) in 256 scaled by 30."""
    x = x.clone()
    x[:, ::256] *= 30
    return x


def trip(x: torch.Tensor, text: str, noise: Noise | None = None) -> torch.Tensor:
    """x after its round trip through a format, fp32."""
    spec = QuantSpec.parse(text)
    codes, scales = encode(x, spec, noise=noise)
    return decode(codes, scales, spec, x.shape)


def noise_ratio(exact: torch.Tensor, approximate: torch.Tensor) -> float:
    """Quantisation noise over signal, both as sums of squares in fp64."""
    noise = (approximate.double() - exact.double()).square().sum()
    return float(noise / exact.double().square().sum())


def sqnr(exact: torch.Tensor, approximate: torch.Tensor) -> float:
    """Signal over quantisation noise, in dB."""
    ratio = noise_ratio(exact, approximate)
    return math.inf if ratio == 0 else -10 * math.log10(ratio)


def slope(exact: torch.Tensor, approximate: torch.Tensor) -> float:
    """⟨y, x⟩ / ⟨x, x⟩: 1 where rounding is unbiased, below where it shrinks."""
    x = exact.double()
    return float((x * approximate.double()).sum() / x.square().sum())


def mse(exact: torch.Tensor, approximate: torch.Tensor) -> float:
    """Mean squared error."""
    return float((approximate.double() - exact.double()).square().mean())


def best_clip(quantise: Callable[[torch.Tensor], torch.Tensor], scales: torch.Tensor) -> float:
    """Least mean squared error of `quantise(x / s) · s` for x ~ N(0, 1) over s, by integrating the density.

    A grid of scales, then a golden-section search around the best of them.
    """
    x = torch.linspace(-9, 9, 180_001, dtype=torch.float64)
    density = torch.exp(-x.square() / 2) / math.sqrt(2 * math.pi) * (x[1] - x[0])

    def error(s: float) -> float:
        return float(((quantise(x / s) * s - x).square() * density).sum())

    errors = [error(float(s)) for s in scales]
    at = min(range(len(errors)), key=errors.__getitem__)
    low, high = float(scales[max(at - 1, 0)]), float(scales[min(at + 1, len(errors) - 1)])
    ratio = (math.sqrt(5) - 1) / 2
    for _ in range(40):
        left, right = high - ratio * (high - low), low + ratio * (high - low)
        low, high = (low, right) if error(left) < error(right) else (left, high)
    return error((low + high) / 2)
