"""Q8_0 and Q4_0, ggml's grids, so that a model can be trained in the very numbers it is deployed in.

    Q8_0   32 values share fp16 d = amax / 127            code = round(x / d), half away from zero     34 bytes
    Q4_0   32 values share fp16 d = m / -8, m the value   code = trunc(x / d + 8.5), at most 15        18 bytes
           of largest magnitude with its sign             x ≈ d · (code - 8)

m's sign makes the largest value meet code 0 = -8 exactly, so the asymmetric grid -8…7 loses nothing.  ggml alone takes
codes from the unrounded fp32 d and stores it as fp16.  Low nibbles of a block are its values 0…15, high ones 16…31.
Blocks run along rows, whose length must be a multiple of 32.  Source: ggml-quants, and the `gguf` package (tested bit
for bit).
"""

from __future__ import annotations

import torch

from lumen.core import QuantError
from lumen.formats.base import Codec, Request, Scales, Shape
from lumen.formats.scales import check_finite, check_scale
from lumen.formats.spec import QuantSpec

BLOCK = 32


def _encode(x: torch.Tensor, spec: QuantSpec, ask: Request) -> tuple[torch.Tensor, Scales]:
    if x.ndim == 0 or x.shape[-1] % BLOCK:
        raise QuantError(
            f"{spec.element} needs rows of a multiple of 32 values, not {list(x.shape)}",
            where=ask.name,
            fix="leave this layer out with a rule `none`",
        )
    blocks = x.float().reshape(*x.shape[:-1], x.shape[-1] // BLOCK, BLOCK)
    amax = blocks.abs().amax(-1)
    check_finite(amax, ask.nonfinite, ask.name)
    if spec.element == "q8_0":
        d = amax / 127
        scaled = blocks * _inverse(d)
        codes = (torch.sign(scaled) * torch.floor(scaled.abs() + 0.5)).to(torch.int8).reshape(x.shape)
    else:
        at = blocks.abs().argmax(-1, keepdim=True)
        d = blocks.gather(-1, at).squeeze(-1) / -8
        # product and sum are each rounded to fp32, as ggml's code says; a wider product moves values across ties
        low, high = torch.trunc(blocks * _inverse(d) + 8.5).clamp(0, 15).to(torch.uint8).split(BLOCK // 2, dim=-1)
        codes = (low | (high << 4)).reshape(*x.shape[:-1], x.shape[-1] // 2)
    scale = d.to(torch.float16)
    scale = torch.where(torch.isfinite(amax) & torch.isfinite(scale), scale, torch.nan)
    check_scale(scale, ask.nonfinite, ask.name)
    return codes, {"scale": scale}


def _inverse(d: torch.Tensor) -> torch.Tensor:
    return torch.where(d == 0, 0.0, 1.0 / d).unsqueeze(-1)


def _decode(codes: torch.Tensor, scales: Scales, spec: QuantSpec, shape: Shape) -> torch.Tensor:
    d = scales["scale"].float().unsqueeze(-1)
    if spec.element == "q8_0":
        values = codes.float().reshape(*d.shape[:-1], BLOCK)
    else:
        packed = codes.reshape(*d.shape[:-1], BLOCK // 2)
        values = torch.cat([packed & 15, packed >> 4], dim=-1).float() - 8
    return (values * d).reshape(shape)


def gguf_blocks(codes: torch.Tensor, scales: Scales, spec: QuantSpec) -> torch.Tensor:
    """The bytes of a GGUF tensor: uint8 [..., blocks · 34 or 18], each block its fp16 d and its codes."""
    d = scales["scale"].contiguous().unsqueeze(-1).view(torch.uint8)
    body = codes.contiguous().view(torch.uint8).reshape(*d.shape[:-1], -1)
    return torch.cat([d, body], dim=-1).flatten(-2)


GGML = Codec(_encode, _decode, overhead=lambda spec: 16.0)
