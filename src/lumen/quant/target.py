"""The chip whose numbers are computed, by name: its FP8 dialect, and which products its units multiply.

FP8 means two things.  gfx942 (MI300) reads a code as FNUZ, half of what OCP reads: E4M3 there ends at 240, not at 448.
So an operand made for one product takes the dialect of the chip that multiplies it, and its scale is amax / 240 there.

What is *stored* is OCP on every chip: the codes of a frozen weight, and whatever a checkpoint holds.  That direction is
exact (the same bits, twice the scale, 0x80 as 0x00), the other is not: FNUZ has 0x7F as a number, OCP as NaN.  So a run
saved on gfx942 goes on on gfx950, on NVIDIA or on a CPU, and back; only what a step makes and drops again differs, by
the rounding of the two grids.

The target is by default the chip that the weights are on.  Naming another computes that chip's numbers here, which is
how they are tested on a CPU.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from lumen.core import QuantError
from lumen.formats import QuantSpec
from lumen.formats.catalog import FLOAT8
from lumen.hardware import code_target, fp8_dialect, is_native
from lumen.kernels import target_of
from lumen.quant.plan import GemmPlan, LayerPlan

_ELEMENTS = {"int8": "int8", "mxfp8_e4m3": "mxfp8", "mxfp8_e5m2": "mxfp8", "mxfp4": "mxfp4"} | dict.fromkeys(
    FLOAT8, "fp8"
)
"""Element format → what the chip table calls the units that multiply it."""


def resolve(target: str | None, device: torch.device | str) -> str:
    """The architecture of a named chip (`MI300X`, `gfx942`, `cpu`), or of `device` where none is named.

    Raises HardwareError for a name that is not known.
    """
    return code_target(target) if target else target_of(device)


def in_dialect(plan: LayerPlan, target: str, name: str = "") -> LayerPlan:
    """`plan` with the operands that are made for one product in the dialect of `target`; stored codes stay OCP.

    Raises QuantError where a rule asks for stored codes in FNUZ.
    """
    if plan.stores_codes and plan.forward.right is not None and plan.forward.right.dialect != "ocp":
        raise QuantError(
            f"a frozen weight is stored in OCP codes on every chip, not as {plan.forward.right}",
            where=name,
            fix="leave the dialect out: operands take that of the chip they are multiplied on",
        )
    dialect = fp8_dialect(target)

    def made(spec: QuantSpec | None) -> QuantSpec | None:
        return spec.with_(dialect=dialect) if spec is not None and spec.element in FLOAT8 else spec

    def product(gemm: GemmPlan, *, weight: bool) -> GemmPlan:
        return GemmPlan(made(gemm.left), gemm.right if weight and plan.stores_codes else made(gemm.right))

    if dialect == "ocp":  # what a spec says without a dialect; a spec that names one keeps it
        return plan
    return replace(
        plan,
        forward=product(plan.forward, weight=True),
        dgrad=product(plan.dgrad, weight=True),
        wgrad=product(plan.wgrad, weight=False),
    )


def units(left: QuantSpec | None, right: QuantSpec | None, target: str) -> str:
    """The element type in which the chip's own units multiply this pair; empty where they cannot."""
    elements = {_ELEMENTS.get(spec.element, "") if spec else "" for spec in (left, right)}
    element = elements.pop() if len(elements) == 1 else ""
    return element if element and is_native(target, element) else ""
