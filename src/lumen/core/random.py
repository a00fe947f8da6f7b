"""Counter-based randomness: Philox4x32-10 (Salmon et al., SC'11; Triton's `tl.randint4x`).

A counter-based generator has no state to save: the number for (seed, tensor, step, element) is a pure function of
them.  So a resumed run repeats bit for bit, and a CPU, a Triton kernel and a test see the same numbers.

Layout (NUMERICS): key = (seed, hash of tensor name and role), counter = (element, step, micro-step, rank).
All arithmetic is on uint32 held in int64 tensors, exact on every device.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import torch

_M0, _M1 = 0xD2511F53, 0xCD9E8D57
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_MASK = 0xFFFFFFFF
_PIECE = 1 << 14
"""Blocks of four words made at a time on a CPU: a dozen int64 temporaries of 128 KiB."""


def hash_name(name: str) -> int:
    """A stable 32-bit hash of a tensor's name and role (Python's own `hash` differs between processes)."""
    return int.from_bytes(hashlib.blake2b(name.encode("utf-8"), digest_size=4).digest(), "little")


Word = torch.Tensor | int
"""A 32-bit word: a number, or int64 tensors of them."""


def _mulhilo(a: int, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """High and low 32 bits of the 64-bit product of a uint32 constant and uint32 values held in int64.

    int64 wraps modulo 2^64, which leaves the bits of the unsigned product; the mask undoes the arithmetic shift.
    """
    product = b * a
    return (product >> 32) & _MASK, product & _MASK


def philox4x32(
    key: tuple[Word, Word], counter: tuple[Word, Word, Word, Word]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Ten Philox rounds; returns four int64 tensors with values in [0, 2^32), of the broadcast shape of `counter`.

    Words may be tensors, so that a step or a key that changes does not change a compiled graph.
    """
    device = next((c.device for c in counter if isinstance(c, torch.Tensor)), torch.device("cpu"))
    parts = [torch.as_tensor(c, dtype=torch.int64, device=device) & _MASK for c in counter]
    c0, c1, c2, c3 = torch.broadcast_tensors(*parts)
    k0, k1 = (k.to(device) & _MASK if isinstance(k, torch.Tensor) else k & _MASK for k in key)
    for _ in range(10):
        hi0, lo0 = _mulhilo(_M0, c0)
        hi1, lo1 = _mulhilo(_M1, c2)
        c0, c1, c2, c3 = hi1 ^ c1 ^ k0, lo1, hi0 ^ c3 ^ k1, lo0
        k0, k1 = (k0 + _W0) & _MASK, (k1 + _W1) & _MASK
    return c0, c1, c2, c3


def _words(
    numel: int, seed: Word, name: str | Word, counter: tuple[Word, Word, Word], device: str | torch.device
) -> Iterator[torch.Tensor]:
    """int64 [n, 4] words of consecutive blocks.

    Eager, a tensor is made in pieces that stay in a core's cache: five times as fast as ten rounds over main memory.
    """
    key = (seed, hash_name(name) if isinstance(name, str) else name)
    blocks = (numel + 3) // 4
    size = blocks if torch.compiler.is_compiling() or torch.device(device).type != "cpu" else _PIECE
    for start in range(0, blocks, max(size, 1)):
        element = torch.arange(start, min(start + size, blocks), dtype=torch.int64, device=device)
        yield torch.stack(philox4x32(key, (element, *counter)), dim=1)


def random_bits(
    numel: int,
    *,
    seed: Word,
    name: str | Word,
    step: Word = 0,
    micro_step: Word = 0,
    rank: Word = 0,
    device: str | torch.device = "cpu",
) -> torch.Tensor:
    """int64 tensor [numel] of uniform 32-bit integers for one tensor at one step.

    name: of the tensor and its role, or its `hash_name`.
    """
    pieces = list(_words(numel, seed, name, (step, micro_step, rank), device))
    if not pieces:
        return torch.empty(0, dtype=torch.int64, device=device)
    return (pieces[0] if len(pieces) == 1 else torch.cat(pieces)).reshape(-1)[:numel]


def uniform24(
    numel: int,
    *,
    seed: Word,
    name: str | Word,
    step: Word = 0,
    micro_step: Word = 0,
    rank: Word = 0,
    device: str | torch.device = "cpu",
) -> torch.Tensor:
    """fp32 tensor [numel] of uniforms in [0, 1) with 24 bits; arguments as in `random_bits`."""
    pieces = [
        (words >> 8).to(torch.float32) * 2.0**-24
        for words in _words(numel, seed, name, (step, micro_step, rank), device)
    ]
    if not pieces:
        return torch.empty(0, dtype=torch.float32, device=device)
    return (pieces[0] if len(pieces) == 1 else torch.cat(pieces)).reshape(-1)[:numel]
