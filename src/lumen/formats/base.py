"""What a codec is: a function each way, the names of its scale tensors, and what they cost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from lumen.formats.noise import Noise
from lumen.formats.spec import QuantSpec

Scales = dict[str, torch.Tensor]
Shape = torch.Size | tuple[int, ...]


@dataclass(frozen=True)
class Request:
    """What `encode` was asked for besides the tensor and the spec."""

    noise: Noise | None = None
    nonfinite: str = "raise"
    scale_dtype: torch.dtype = torch.float32
    name: str = ""
    importance: torch.Tensor | None = None
    scale: torch.Tensor | None = None


@dataclass(frozen=True)
class Codec:
    """encode(x, spec, request) → codes and scales.  decode(codes, scales, spec, shape) → fp32 values of `shape`.

    scale_names: in the order in which layers keep them.  overhead: bits per group of scales.
    """

    encode: Callable[[torch.Tensor, QuantSpec, Request], tuple[torch.Tensor, Scales]]
    decode: Callable[[torch.Tensor, Scales, QuantSpec, Shape], torch.Tensor]
    scale_names: Callable[[QuantSpec], tuple[str, ...]] = lambda spec: ("scale",)
    overhead: Callable[[QuantSpec], float] = lambda spec: 32.0
