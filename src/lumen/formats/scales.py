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
        scale = torch.exp2(torch.ceil(torch.log2(scale)))
    scale = scale.to(storage)
    # a zero group must not divide by zero; below the smallest normal number a scale has too few bits to be one, and
    # the values (under 1e-35) become zeros.  So a code never needs clamping after rounding to nearest.
    scale = torch.where(scale < torch.finfo(torch.float32).tiny, torch.ones_like(scale), scale)
    return torch.where(torch.isfinite(amax), scale, torch.full_like(scale, torch.nan))


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
