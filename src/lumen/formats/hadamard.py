"""The randomised Hadamard transform: outliers spread over their neighbours before they are quantised.

H is the n × n matrix of ±1/√n with H·Hᵀ = 1.  A block x of n neighbours along the contraction dimension becomes
(x·D)·H with D a fixed diagonal of random signs: one value of 30 among n = 16 becomes sixteen values of ±7.5, so the
scale of the block falls by four.  Both operands of a product are transformed alike along the dimension they are
contracted over, and it cancels: (x·D·H)·(w·D·H)ᵀ = x·wᵀ.  The signs (Philox, one fixed draw) keep inputs that are
themselves rows of H, such as constants, from being gathered into one value.

Sources: QuIP# (arXiv 2402.04396), Training LLMs with MXFP4 (arXiv 2502.20586).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from lumen.core.random import random_bits


def _matrix(width: int) -> torch.Tensor:
    """fp32 [width, width] D·H, orthonormal."""
    h = torch.ones(1, 1)
    while h.shape[0] < width:  # Sylvester's construction
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)])
    signs = 1.0 - 2.0 * (random_bits(width, seed=0, name=f"hadamard{width}") & 1).float()
    return signs[:, None] * h / width**0.5


_MATRICES = {width: _matrix(width) for width in (16, 32)}
"""Made at import, so that a compiler finds constants instead of the code that draws the signs."""


def transform(x: torch.Tensor, width: int) -> torch.Tensor:
    """fp32 x [..., K] → [..., K rounded up to `width`]: every `width` neighbours times D·H."""
    matrix = _MATRICES[width].to(x.device)
    x = F.pad(x.float(), (0, -x.shape[-1] % width))
    return (x.reshape(*x.shape[:-1], x.shape[-1] // width, width) @ matrix).flatten(-2)


def inverse(y: torch.Tensor, width: int, count: int) -> torch.Tensor:
    """Undo `transform`: fp32 [..., count]."""
    matrix = _MATRICES[width].to(y.device)
    return (y.reshape(*y.shape[:-1], y.shape[-1] // width, width) @ matrix.t()).flatten(-2)[..., :count]
