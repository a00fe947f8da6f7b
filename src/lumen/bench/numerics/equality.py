"""Bit-equality with implementations that we did not write, on values chosen to be awkward.

Each comparison counts the codes, scales or values that differ; none may.  "Decodes" are read in both directions: our
codes by their decoder and theirs by ours.  A package that is not installed is said to be missing, never passed over.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from lumen.bench.numerics.measure import gaussian, outliers


@dataclass(frozen=True)
class Comparison:
    """run() → (how many differ, how many were compared)."""

    package: str
    name: str
    run: Callable[[], tuple[int, int]]

    @property
    def id(self) -> str:
        return f"{self.package}: {self.name}"


def comparisons() -> list[Comparison]:
    """All of them; nothing is imported or run yet."""
    from lumen.bench.numerics import peer_bitsandbytes, peer_gguf, peer_torch, peer_torchao

    modules = (peer_bitsandbytes, peer_torch, peer_torchao, peer_gguf)
    return [comparison for module in modules for comparison in module.comparisons()]


def version(package: str) -> str:
    """The installed version, or empty."""
    if importlib.util.find_spec(package) is None:
        return ""
    return importlib.metadata.version(package)


def hard(rows: int = 64, cols: int = 512) -> torch.Tensor:
    """fp32 [rows, cols]: Gaussian with outlier channels; zeros, ties, signs, tiny, huge and mixed magnitudes."""
    x = outliers(gaussian(rows, cols))
    x[0] = 0
    x[1] *= 1e-6
    x[2] = torch.linspace(-127, 127, cols).round() / 2
    x[3] = x[3].sign()
    x[4] *= 1e-30
    x[5] *= 1e30
    x[6] = torch.logspace(-20, 20, cols) * x[6].sign()
    x[7] = torch.arange(cols) % 13 - 6.0
    x[8, 1:] = 0  # one value in a row of zeros
    return x


def differing(a: torch.Tensor, b: torch.Tensor) -> tuple[int, int]:
    """Elements that differ, by value (-0 equals 0, NaN equals NaN); another shape is everything."""
    if a.shape != b.shape:
        return max(a.numel(), b.numel()), max(a.numel(), b.numel())
    a, b = (t.double() if t.is_floating_point() else t for t in (a, b))
    unequal = (a != b) & ~(torch.isnan(a) & torch.isnan(b)) if a.is_floating_point() else a != b
    return int(unequal.sum()), a.numel()


def total(*parts: tuple[int, int]) -> tuple[int, int]:
    """Several counts as one."""
    return sum(p[0] for p in parts), sum(p[1] for p in parts)


@contextmanager
def quiet() -> Iterator[None]:
    """Without the warnings that these packages log when they are imported on a machine without a GPU."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)
