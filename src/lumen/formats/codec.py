"""encode and decode: from a tensor and a spec to codes and scales, and back.

Every format gives its result in the same form, so that whatever stores, moves or multiplies quantised tensors needs to
know no format: `codes`, a tensor of the smallest whole type, and `scales`, named tensors (`scale`, and for formats that
need more, further ones).
"""

from __future__ import annotations

import torch

from lumen.core import QuantError
from lumen.formats.groups import group_amax, scale_shape
from lumen.formats.integer import MAX, decode_integer, encode_integer
from lumen.formats.noise import Noise
from lumen.formats.scales import absmax_scale, check_finite
from lumen.formats.spec import QuantSpec

BUILT: frozenset[str] = frozenset({"int8"})
"""Element formats whose codec exists in this version; the rest parse but cannot be used."""

Scales = dict[str, torch.Tensor]


def require_built(spec: QuantSpec, where: str = "") -> None:
    """Raise QuantError where this version cannot run the spec."""
    if spec.element not in BUILT:
        missing = f"the format {spec.element}"
    elif spec.transform != "none":
        missing = f"the transform {spec.transform}"
    elif spec.scaling != "dynamic":
        missing = f"{spec.scaling} scaling"
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
) -> tuple[torch.Tensor, Scales]:
    """Quantise x [..., K] (fp16, bf16 or fp32).

    noise:       the draw of stochastic rounding; required by `+sr`, refused otherwise (an ignored option is a bug).
    nonfinite:   `raise` on a group with NaN or Inf, or `mark` it so that it dequantises to NaN.
    scale_dtype: storage type of the scales, to which they are rounded before the codes are computed.
    Returns (codes, scales).  Raises QuantError.
    """
    require_built(spec, name)
    if not x.is_floating_point():
        raise QuantError(f"only floating-point tensors are quantised, not {x.dtype}", where=name)
    if (noise is None) != (spec.rounding == "nearest"):
        raise QuantError(
            f"{spec} "
            + ("rounds stochastically and needs a Noise" if noise is None else "rounds to nearest: no Noise"),
            where=name,
        )
    amax = group_amax(x, spec.granularity)
    check_finite(amax, nonfinite, name)
    scale = absmax_scale(amax, MAX[spec.element], rule=spec.rule, storage=scale_dtype)
    return encode_integer(x, scale, spec.granularity, MAX[spec.element], noise), {"scale": scale}


def decode(
    codes: torch.Tensor,
    scales: Scales,
    spec: QuantSpec,
    shape: torch.Size | tuple[int, ...],
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """The values that the codes stand for: `shape`, `dtype`."""
    require_built(spec)
    return decode_integer(codes, scales["scale"], spec.granularity, dtype).reshape(shape)


def scale_names(spec: QuantSpec) -> tuple[str, ...]:
    """Names of the tensors that `encode` gives beside the codes, in the order in which layers keep them."""
    return ("scale",)


def bits_per_value(spec: QuantSpec, shape: torch.Size | tuple[int, ...], scale_bits: int = 32) -> float:
    """Stored bits per value, scales included, for a tensor of `shape`."""
    numel = max(1, int(torch.Size(shape).numel()))
    scales = max(1, int(torch.Size(scale_shape(shape, spec.granularity)).numel()))
    return spec.format.bits + scale_bits * scales / numel
