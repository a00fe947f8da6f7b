"""INT8 matrix product in plain torch: what a faster kernel must equal bit for bit."""

from __future__ import annotations

import torch

_EXACT_K = 1024
"""127² · 1024 < 2²⁴: sums over this many products are exact in fp32 in any order."""


def int8_matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a [M, K] int8 times b [K, N] int8 → int32 [M, N], exact.

    Integer products have no fast path on most devices, fp32 ones do: K is cut so that every partial sum is an integer
    that fp32 holds exactly, and the parts are added as int32.
    """
    out = torch.zeros(a.shape[0], b.shape[1], dtype=torch.int32, device=a.device)
    for start in range(0, a.shape[1], _EXACT_K):
        part = a[:, start : start + _EXACT_K].float() @ b[start : start + _EXACT_K].float()
        out += part.to(torch.int32)
    return out
