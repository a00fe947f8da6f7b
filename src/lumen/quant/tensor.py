"""QuantizedTensor: codes, scales and the spec that explains them, as one value.

It is a plain object around plain tensors: it moves, saves and loads, and `dequantize` gives the values back.  It is no
tensor subclass and takes no part in autograd; layers keep its parts as parameters and buffers of their own.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from lumen.core import QuantError
from lumen.formats import Noise, QuantSpec, decode, encode
from lumen.formats.codec import scale_names
from lumen.quant.layouts import from_disk, to_disk

_META = "lumen.quantized"


@dataclass(frozen=True)
class QuantizedTensor:
    """codes: integer tensor.  scales: named tensors, `scale` among them.  shape, dtype: of what was quantised."""

    codes: torch.Tensor
    scales: dict[str, torch.Tensor]
    spec: QuantSpec
    shape: torch.Size
    dtype: torch.dtype

    @property
    def scale(self) -> torch.Tensor:
        return self.scales["scale"]

    @property
    def device(self) -> torch.device:
        return self.codes.device

    @property
    def nbytes(self) -> int:
        """Stored bytes, scales included."""
        return self.codes.nbytes + sum(s.nbytes for s in self.scales.values())

    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The values [shape], in the dtype that was quantised or in `dtype`."""
        return decode(self.codes, self.scales, self.spec, self.shape, dtype or self.dtype)

    def to(self, target: torch.device | str | torch.dtype) -> QuantizedTensor:
        """A device moves codes and scales; a dtype changes only what `dequantize` gives."""
        if isinstance(target, torch.dtype):
            return replace(self, dtype=target)
        scales = {name: scale.to(target) for name, scale in self.scales.items()}
        return replace(self, codes=self.codes.to(target), scales=scales)

    def tensors(self, prefix: str = "weight") -> dict[str, torch.Tensor]:
        """The keys on the disk (quant.layouts, docs/formats.md)."""
        parts = (self.codes, *(self.scales[name] for name in scale_names(self.spec)))
        disk = to_disk(parts, self.spec, tuple(self.shape), self.dtype)
        return {f"{prefix}{suffix}": tensor for suffix, tensor in disk.items()}

    def save(self, path: Path | str) -> None:
        """One safetensors file with the spec in its metadata."""
        meta = {"spec": str(self.spec), "shape": list(self.shape), "dtype": str(self.dtype).removeprefix("torch.")}
        tensors = {name: tensor.contiguous() for name, tensor in self.tensors().items()}
        save_file(tensors, str(path), metadata={_META: json.dumps(meta)})

    @classmethod
    def load(cls, path: Path | str, device: str = "cpu") -> QuantizedTensor:
        """What `save` wrote.  Raises QuantError for another file."""
        with safe_open(str(path), framework="pt", device=device) as file:
            meta = json.loads((file.metadata() or {}).get(_META, "null"))
            if meta is None:
                raise QuantError("this safetensors file holds no quantised tensor", where=str(path))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        spec = QuantSpec.parse(meta["spec"])
        stored = from_disk({name.removeprefix("weight"): t for name, t in tensors.items()}, spec, str(path))
        scales = dict(zip(scale_names(spec), stored.parts[1:], strict=True))
        return cls(stored.parts[0], scales, spec, torch.Size(meta["shape"]), getattr(torch, meta["dtype"]))


def quantize_tensor(
    x: torch.Tensor,
    spec: QuantSpec | str,
    *,
    noise: Noise | None = None,
    nonfinite: str = "raise",
    name: str = "",
) -> QuantizedTensor:
    """Quantise x [..., K] by a spec such as `int8:row` or `mxfp4:even+hadamard16+sr`.

    noise: names the draw of stochastic rounding; without one `+sr` uses seed 0 and `name`.
    Raises QuantError (unknown or unbuilt spec, NaN or Inf unless `nonfinite="mark"`).
    """
    spec = QuantSpec.parse(spec)
    if noise is None and spec.rounding == "stochastic":
        noise = Noise(name)
    codes, scales = encode(x.detach(), spec, noise=noise, nonfinite=nonfinite, name=name)
    return QuantizedTensor(codes, scales, spec, x.shape, x.dtype)
