"""Counter-based randomness: Philox4x32-10 (Salmon et al., SC'11; Triton's `tl.randint4x`).

A counter-based generator has no state to save: the number for (seed, tensor, step, element) is a pure function of
them.  So a resumed run repeats bit for bit, and a CPU, a Triton kernel and a test see the same numbers.

Layout (NUMERICS): key = (seed, hash of tensor name and role), counter = (element, step, micro-step, rank).
All arithmetic is on uint32 held in int64 tensors, exact on every device.
"""

from __future__ import annotations

import hashlib

import torch

_M0, _M1 = 0xD2511F53, 0xCD9E8D57
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_MASK = 0xFFFFFFFF


def hash_name(name: str) -> int:
    """A stable 32-bit hash of a tensor's name and role (Python's own `hash` differs between processes)."""
    return int.from_bytes(hashlib.blake2b(name.encode("utf-8"), digest_size=4).digest(), "little")


def _mulhilo(a: int, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """High and low 32 bits of the 64-bit product of a uint32 constant and uint32 values held in int64."""
    b_hi, b_lo = b >> 16, b & 0xFFFF
    lo = a * b_lo  # < 2^48
    hi = a * b_hi  # < 2^48
    low_sum = lo + ((hi & 0xFFFF) << 16)  # < 2^49
    return ((hi >> 16) + (low_sum >> 32)) & _MASK, low_sum & _MASK


def philox4x32(
    key: tuple[int, int], counter: tuple[torch.Tensor | int, torch.Tensor | int, torch.Tensor | int, torch.Tensor | int]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Ten Philox rounds; returns four int64 tensors with values in [0, 2^32), of the broadcast shape of `counter`."""
    device = next((c.device for c in counter if isinstance(c, torch.Tensor)), torch.device("cpu"))
    parts = [torch.as_tensor(c, dtype=torch.int64, device=device) & _MASK for c in counter]
    c0, c1, c2, c3 = torch.broadcast_tensors(*parts)
    k0, k1 = key[0] & _MASK, key[1] & _MASK
    for _ in range(10):
        hi0, lo0 = _mulhilo(_M0, c0)
        hi1, lo1 = _mulhilo(_M1, c2)
        c0, c1, c2, c3 = hi1 ^ c1 ^ k0, lo1, hi0 ^ c3 ^ k1, lo0
        k0, k1 = (k0 + _W0) & _MASK, (k1 + _W1) & _MASK
    return c0, c1, c2, c3


def random_bits(
    numel: int,
    *,
    seed: int,
    name: str,
    step: int = 0,
    micro_step: int = 0,
    rank: int = 0,
    device: str | torch.device = "cpu",
) -> torch.Tensor:
    """int64 tensor [numel] of uniform 32-bit integers for one tensor at one step."""
    blocks = (numel + 3) // 4
    element = torch.arange(blocks, dtype=torch.int64, device=device)
    words = philox4x32((seed, hash_name(name)), (element, step, micro_step, rank))
    return torch.stack(words, dim=1).reshape(-1)[:numel]


def uniform24(
    numel: int,
    *,
    seed: int,
    name: str,
    step: int = 0,
    micro_step: int = 0,
    rank: int = 0,
    device: str | torch.device = "cpu",
) -> torch.Tensor:
    """fp32 tensor [numel] of uniforms in [0, 1) with 24 bits."""
    bits = random_bits(numel, seed=seed, name=name, step=step, micro_step=micro_step, rank=rank, device=device)
    return (bits >> 8).to(torch.float32) * 2.0**-24
