"""Codes smaller than a byte, packed along the last dimension.

    4 bits   two to a byte: low nibble first (compressed-tensors, MX), or high nibble first (bitsandbytes)
    2 bits   four to a byte, lowest bits first
    6 bits   four to three bytes, as one 24-bit little-endian number, lowest bits first

The last dimension is padded with zeros to whole bytes; whoever unpacks says how many values there were.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


def packed_size(count: int, bits: int) -> int:
    """Bytes of `count` codes."""
    return -(-count // 4) * 3 if bits == 6 else -(-count * bits // 8)


def pack(codes: torch.Tensor, bits: int, *, high_first: bool = False) -> torch.Tensor:
    """uint8 codes [..., K] below 2^bits → uint8 [..., packed_size(K, bits)]."""
    if bits == 8:
        return codes
    per = 4 if bits == 6 else 8 // bits
    codes = F.pad(codes, (0, -codes.shape[-1] % per))
    groups = codes.reshape(*codes.shape[:-1], codes.shape[-1] // per, per).to(torch.int32)
    shifts = torch.arange(per, device=codes.device, dtype=torch.int32) * bits
    if high_first:
        shifts = shifts.flip(0)
    words = (groups << shifts).sum(-1)
    if bits != 6:
        return words.to(torch.uint8)
    parts = torch.stack([words & 0xFF, (words >> 8) & 0xFF, words >> 16], dim=-1)
    return parts.to(torch.uint8).flatten(-2)


def unpack(packed: torch.Tensor, bits: int, count: int, *, high_first: bool = False) -> torch.Tensor:
    """The inverse: uint8 codes [..., count]."""
    if bits == 8:
        return packed
    per = 4 if bits == 6 else 8 // bits
    words = packed.to(torch.int32)
    if bits == 6:
        parts = words.reshape(*words.shape[:-1], words.shape[-1] // 3, 3)
        words = parts[..., 0] | (parts[..., 1] << 8) | (parts[..., 2] << 16)
    shifts = torch.arange(per, device=packed.device, dtype=torch.int32) * bits
    if high_first:
        shifts = shifts.flip(0)
    codes = (words.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)
    return codes.flatten(-2)[..., :count].to(torch.uint8)
