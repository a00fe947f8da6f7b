"""Against gguf, ggml's own Python package: the bytes of Q8_0 and Q4_0 blocks, and the values read back from them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from lumen.bench.numerics.equality import Comparison, differing, hard, total
from lumen.formats import QuantSpec, decode, encode
from lumen.formats.ggml import gguf_blocks


def comparisons() -> Iterator[Comparison]:
    for name in ("Q8_0", "Q4_0"):
        yield Comparison("gguf", f"{name.lower()}: block bytes, decodes", partial(_blocks, name))


def _blocks(name: str) -> tuple[int, int]:
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize, quantize

    kind, spec = GGMLQuantizationType[name], QuantSpec.parse(name.lower())
    parts: list[tuple[int, int]] = []
    x = hard().clamp(-6e4, 6e4)  # d is fp16
    for values in (
        x,
        x.to(torch.bfloat16),
        x.reshape(8, 8, 512),
        (x * 4).round() / 8,
        torch.ones(1, 32),
        -torch.ones(3, 32),
    ):
        want: Any = quantize(values.float().numpy(), kind)
        codes, scales = encode(values, spec)
        parts.append(differing(gguf_blocks(codes, scales, spec), torch.from_numpy(want)))
        parts.append(differing(decode(codes, scales, spec, values.shape), torch.from_numpy(dequantize(want, kind))))
    return total(*parts)
