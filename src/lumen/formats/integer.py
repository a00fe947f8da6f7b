"""INT8 and INT4: evenly spaced codes, symmetric about zero.

    scale = amax / 127 (or 7)        code = clamp(round(x / scale), ±127 or ±7)        x ≈ code · scale

The code -128 is not used, so the grid is symmetric and negating a tensor negates its codes.  Rounding is to nearest,
ties to even, or stochastic: floor(x / scale + U[0, 1)).  With a step of one scale unit the error of nearest rounding is
uniform in ±½ and has variance 1/12; stochastic rounding has 1/6, exactly twice.
"""

from __future__ import annotations

import torch

from lumen.formats.groups import spread
from lumen.formats.noise import Noise
from lumen.formats.spec import Granularity

MAX = {"int8": 127, "int4": 7}


def encode_integer(
    x: torch.Tensor, scale: torch.Tensor, gran: Granularity, max_code: int, noise: Noise | None = None
) -> torch.Tensor:
    """x [..., K] float → int8 codes of the same shape; `noise` makes the rounding stochastic.

    The arithmetic is fp32 whatever x is, as division in bf16 would move values across ties.  A group that is marked
    with a NaN scale may get any code, since 0 · NaN is NaN too.
    """
    units = x.float() / spread(scale.float(), x.shape, gran)
    rounded = torch.round(units) if noise is None else torch.floor(units + noise.uniform(x.shape, x.device))
    return rounded.clamp(-max_code, max_code).to(torch.int8)


def decode_integer(
    codes: torch.Tensor, scale: torch.Tensor, gran: Granularity, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """int8 codes [..., K] → values of the same shape: codes · scale in fp32, then rounded once to `dtype`."""
    return (codes.float() * spread(scale.float(), codes.shape, gran)).to(dtype)
