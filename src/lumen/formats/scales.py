"""Scale rules: from a group's largest magnitude to the number its codes are multiplied with.

One convention everywhere: x ≈ codes · scale.  The scale is computed in fp32 and rounded to the type it is stored in
*before* the codes are computed, so that what is dequantised uses the very number that was divided by.

    absmax  scale = amax / max          the largest value lands on the largest code
    pow2    the same, rounded up to a power of two: multiplying by it is exact
"""

from __future__ import annotations

import torch

from lumen.core import QuantError

NONFINITE = ("raise", "mark")


def absmax_scale(
    amax: torch.Tensor, type_max: float, *, rule: str = "absmax", storage: torch.dtype = torch.float32
) -> torch.Tensor:
    """amax [groups] fp32 → scale [groups] in `storage`.  A group of zeros gets scale 1, one with NaN or Inf gets NaN.

    type_max is the largest code (127 for int8; `torch.finfo(...).max` of the target's dialect for FP8).
    """
    scale = amax / type_max
    if rule == "pow2":
        scale = _power_above(scale)
    scale = scale.to(storage)
    # a zero group must not divide by zero; below the smallest normal number a scale has too few bits to be one, and
    # the values (under 1e-35) become zeros.  So a code never needs clamping after rounding to nearest.
    scale = torch.where(scale < torch.finfo(torch.float32).tiny, torch.ones_like(scale), scale)
    # a scale too large for its type (fp16) is marked like a group that holds infinity
    return torch.where(torch.isfinite(amax) & torch.isfinite(scale), scale, torch.full_like(scale, torch.nan))


def _power_above(x: torch.Tensor) -> torch.Tensor:
    """The least power of two that is at least fp32 x ≥ 0, from its bits: a library's log2 may round across one.

    NaN and infinity stay what they are; so do zero and numbers up to 2^-127, which are no scales anyway.
    """
    x = x.contiguous()
    bits = x.view(torch.int32)
    up = ((bits + 0x7FFFFF) & 0x7F800000).view(torch.float32)
    return torch.where((bits > 1 << 22) & torch.isfinite(x), up, x)


def check_scale(scale: torch.Tensor, policy: str, name: str) -> None:
    """Raise QuantError where the policy is `raise` and a scale does not fit the 16-bit type it is stored in."""
    if policy == "raise" and scale.dtype == torch.float16 and not bool(torch.isfinite(scale).all()):
        raise QuantError(
            f"{int((~torch.isfinite(scale)).sum())} of {scale.numel()} scales are too large for fp16",
            where=name,
            fix="the values are too large for this format; bf16 or fp32 scales hold them",
        )


def check_finite(amax: torch.Tensor, policy: str, name: str) -> None:
    """Raise QuantError where a group holds NaN or Inf and the policy is `raise`; `mark` leaves its scale NaN.

    This reads a value back from the device, so the training path marks: a marked group dequantises to NaN, and the
    trainer's guard names the first module where it appears.
    """
    if policy not in NONFINITE:
        raise QuantError(
            f"there is no policy {policy!r} for non-finite values", fix=f"policies: {', '.join(NONFINITE)}"
        )
    if policy == "raise" and not bool(torch.isfinite(amax).all()):
        count = int((~torch.isfinite(amax)).sum())
        raise QuantError(
            f"{count} of {amax.numel()} groups hold NaN or Inf and cannot be quantised",
            where=name,
            fix="find where the values come from, or quantise with nonfinite='mark' to carry them through as NaN",
        )
