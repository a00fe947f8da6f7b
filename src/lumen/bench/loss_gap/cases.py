"""What the table measures: the recipes that run in this version, and single roles of int8, fp8 and mxfp8.

A case is a `quant:` section.  "int8 weights" quantises the weight in every product that reads it and nothing else, and
so on: one role of the recipe, the other two in high precision.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lumen.core import QuantError
from lumen.quant import recipes

BASELINE = "bf16"

ROLES = {"weights": "weight", "activations": "input", "gradients": "grad_output"}
"""How a single-role case ends → the role."""

_SINGLE = ("int8", "fp8", "mxfp8")

LIMITS = {"int8": 0.5, "fp8-blockwise": 0.5, "mxfp8": 0.5, "mxfp4": 3.0}
"""On base B: per cent of bf16's held-out loss that a recipe may lose."""

YARDSTICK = 0.25
"""Points by which ours may be worse than the independent implementation."""

THREE_SEEDS_ON_B = ("int8", "fp8-blockwise", "mxfp8", "mxfp4")
"""Measured with three seeds on B even where the operands are bit-equal."""

NOT_COMPARED = {
    "mxfp4": "draws random numbers",
    "int8-smooth": "Lumen chooses groups along K; the other smooths alone",
}
"""Cases whose operands cannot be bit-equal to another implementation's, with the reason; so they get three seeds."""


@dataclass(frozen=True)
class Case:
    """name: as in the table, `int8` or `int8 weights`.  section: what `lumen.quantize` is given."""

    name: str
    section: dict[str, Any]

    @property
    def slug(self) -> str:
        return self.name.replace(" ", "_")


def cases() -> tuple[list[Case], dict[str, str]]:
    """The cases that run in this version, and recipe → reason of those that do not.  bf16 is the baseline, no case."""
    ready, missing = [], {}
    for name, why in recipes.available().items():
        if why:
            missing[name] = why
        elif name != BASELINE:
            ready.append(Case(name, {"recipe": name}))
    for name in _SINGLE:
        row = recipes.RECIPES[name]
        for end, role in ROLES.items():
            ready.append(Case(f"{name} {end}", {"recipe": BASELINE, role: getattr(row, role)}))
    return ready, missing


def case(name: str) -> Case:
    """One case by name.  Raises QuantError where there is none, or it cannot run yet."""
    ready, missing = cases()
    for one in ready:
        if one.name == name:
            return one
    if name in missing:
        raise QuantError(f"recipe {name!r} cannot run in this version: {missing[name]}", where="cases")
    raise QuantError(f"there is no case {name!r}", where="cases", fix="one of " + ", ".join(c.name for c in ready))
