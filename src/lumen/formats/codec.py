"""encode and decode: from a tensor and a spec to codes and scales, and back.

Every format gives its result in the same form, so that whatever stores, moves or multiplies quantised tensors needs to
know no format: `codes`, and `scales`, named tensors (`scale`, and for formats that need more, further ones).  Codes
smaller than a byte come packed.  The shape of the tensor is not in the codes; whoever keeps them keeps it.
"""

from __future__ import annotations

import torch

from lumen.core import QuantError
from lumen.formats import hadamard
from lumen.formats.base import Codec, Request, Scales, Shape
from lumen.formats.expanded import EXPANDED
from lumen.formats.ggml import GGML
from lumen.formats.groups import scale_shape
from lumen.formats.lookup import LOOKUP, decode_nf4
from lumen.formats.mx import MX
from lumen.formats.noise import Noise
from lumen.formats.scaled import FLOAT, INTEGER, TERNARY
from lumen.formats.spec import QuantSpec

CODECS: dict[str, Codec] = {
    "int8": INTEGER, "int4": INTEGER, "ternary": TERNARY, "e4m3": FLOAT, "e5m2": FLOAT,
    "mxfp8_e4m3": MX, "mxfp8_e5m2": MX, "mxfp6_e3m2": MX, "mxfp6_e2m3": MX, "mxfp4": MX,
    "nf4": LOOKUP, "dynamic8": LOOKUP, "dynamic4": LOOKUP, "codebook": LOOKUP, "e4m3_expanded": EXPANDED,
    "q8_0": GGML, "q4_0": GGML,
}  # fmt: skip

BUILT: frozenset[str] = frozenset(CODECS)
"""Element formats whose codec exists in this version; the rest parse but cannot be used."""


def require_built(spec: QuantSpec, where: str = "") -> None:
    """Raise QuantError where this version cannot run the spec."""
    if spec.element not in BUILT:
        missing = f"the format {spec.element}"
    elif spec.transform == "smooth":
        missing = f"the transform {spec.transform}"
    else:
        return
    raise QuantError(
        f"{spec} is a valid spec, but {missing} is not built in this version",
        where=where,
        fix=f"built formats: {', '.join(sorted(BUILT))}",
    )


def encode(
    x: torch.Tensor,
    spec: QuantSpec,
    *,
    noise: Noise | None = None,
    nonfinite: str = "raise",
    scale_dtype: torch.dtype = torch.float32,
    name: str = "",
    importance: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
) -> tuple[torch.Tensor, Scales]:
    """Quantise x [..., K] (fp16, bf16 or fp32).

    noise:       the draw of stochastic rounding; required by `+sr`, refused otherwise (an ignored option is a bug).
    nonfinite:   `raise` on a group with NaN or Inf, or `mark` it so that it dequantises to NaN.
    scale_dtype: storage type of the scales of int8, int4, ternary, e4m3 and e5m2, to which they are rounded before the
                 codes are computed; other formats fix their own.
    importance:  weights for a learned codebook: x's shape, or what broadcasts to it (one per input channel, [K]).
    Returns (codes, scales).  Raises QuantError.
    """
    require_built(spec, name)
    if x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise QuantError(f"only fp32, bf16 and fp16 (floating-point) tensors are quantised, not {x.dtype}", where=name)
    if (noise is None) != (spec.rounding == "nearest"):
        raise QuantError(
            f"{spec} "
            + ("rounds stochastically and needs a Noise" if noise is None else "rounds to nearest: no Noise"),
            where=name,
        )
    if (scale is None) != (spec.scaling == "dynamic"):
        raise QuantError(
            f"{spec} " + ("needs a scale from its history" if scale is None else "takes its scale from the tensor"),
            where=name,
            fix="give one as scale=; layers keep a history (quant.scaling)" if scale is None else "leave scale out",
        )
    if importance is not None and spec.element != "codebook":
        raise QuantError(f"{spec.element} has no use for importance weights", where=name, fix="they are for `codebook`")
    if importance is not None:
        importance = _importance(importance, x.shape, name)
    if scale_dtype != torch.float32 and CODECS[spec.element] not in (INTEGER, TERNARY, FLOAT):
        raise QuantError(f"{spec.element} fixes the type of its scales", where=name, fix="leave scale_dtype out")
    if x.ndim == 0:
        x = x.reshape(1)
    if width := _width(spec):
        x = hadamard.transform(x, width)
    ask = Request(noise, nonfinite, scale_dtype, name, importance, scale)
    return CODECS[spec.element].encode(x, spec, ask)


def decode(
    codes: torch.Tensor, scales: Scales, spec: QuantSpec, shape: Shape, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """The values that the codes stand for: `shape`, computed in fp32 and rounded once to `dtype`."""
    require_built(spec)
    if len(shape) == 0:
        return decode(codes, scales, spec, (1,), dtype).reshape(())
    if width := _width(spec):
        padded = (*shape[:-1], -(-shape[-1] // width) * width)
        values = CODECS[spec.element].decode(codes, scales, spec, padded)
        return hadamard.inverse(values, width, shape[-1]).to(dtype)
    large = decode_nf4(codes, scales, spec, shape, dtype)
    return large if large is not None else CODECS[spec.element].decode(codes, scales, spec, shape).to(dtype)


def _importance(weights: torch.Tensor, shape: torch.Size, where: str) -> torch.Tensor:
    """Weights of every value, fp32 [shape].  Raises QuantError for another shape and for what is no weight."""
    try:
        weights = weights.float().expand(shape)
    except RuntimeError:
        raise QuantError(
            f"importance weights of shape {list(weights.shape)} do not fit values of shape {list(shape)}",
            where=where,
            fix="give one weight per value, or one per input channel (the last dimension)",
        ) from None
    if not bool((torch.isfinite(weights) & (weights >= 0)).all()):
        raise QuantError("importance weights must be finite and not negative", where=where)
    return weights


def scale_names(spec: QuantSpec) -> tuple[str, ...]:
    """Names of the tensors that `encode` gives beside the codes, in the order in which layers keep them."""
    return CODECS[spec.element].scale_names(spec)


def bits_per_value(spec: QuantSpec, shape: Shape) -> float:
    """Stored bits per value, scales included, for a tensor of `shape`."""
    numel = max(1, torch.Size(shape).numel())
    if spec.format.flat:
        groups = -(-numel // spec.granularity.cols)
    else:
        groups = torch.Size(scale_shape(shape, spec.granularity)).numel()
    return spec.format.bits + CODECS[spec.element].overhead(spec) * max(1, groups) / numel


def _width(spec: QuantSpec) -> int:
    return int(spec.transform.removeprefix("hadamard")) if spec.transform.startswith("hadamard") else 0
