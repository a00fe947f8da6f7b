"""The named recipes, as data: what each operand is stored and multiplied in, and in which GEMMs.

A recipe is a short list of rules over all modules; nothing else in the code knows a recipe by name.  `available()` says
which can run in this version: a recipe may name a format that parses but is not built yet, and then quantising with it
raises and says which.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches

from lumen.core import QuantError
from lumen.quant.policy import GEMMS, UNBUILT_ROLES, Policy, PolicyBuilder, Rule, parse_spec, require_operand

_BACKWARD = ("dgrad", "wgrad")


@dataclass(frozen=True)
class Recipe:
    """One row of the table.  `backward` replaces the spec of weight and input in dgrad and wgrad."""

    name: str
    weight: str
    input: str
    grad_output: str
    gemms: tuple[str, ...]
    about: str
    backward: str = ""

    def policy(self) -> Policy:
        """The row as rules over all modules."""
        specs: Mapping[str, str] = {"weight": self.weight, "input": self.input, "grad_output": self.grad_output}
        builder = PolicyBuilder()
        if self.backward:
            spec = parse_spec(self.backward)
            builder.rules += [Rule("*", "weight", "dgrad", spec), Rule("*", "input", "wgrad", spec)]
        return builder.add(specs, gemms=self.gemms).build(self.name)


_E4M3_BLOCK = "e4m3:1x128"
_MX_GRAD = "mxfp4:rceil+hadamard16+sr"

RECIPES: dict[str, Recipe] = {
    r.name: r
    for r in (
        Recipe("bf16", "none", "none", "none", (), "high precision everywhere"),
        Recipe("int8", "int8:row", "int8:row", "int8:row", GEMMS, "every GEMM in int8"),
        Recipe("int8-backward", "int8:row", "int8:row", "int8:row", _BACKWARD, "forward in bf16, backward in int8"),
        Recipe("int8-smooth", "int8:row+smooth", "int8:row+smooth", "int8:row", GEMMS, "int8 with outliers folded"),
        Recipe("int8-weight-only", "int8:row", "none", "none", GEMMS, "int8 storage, bf16 compute"),
        Recipe("fp8", "e4m3:tensor", "e4m3:tensor", "e5m2:tensor", GEMMS, "one dynamic scale per tensor"),
        Recipe(
            "fp8-delayed", "e4m3:tensor+delayed", "e4m3:tensor+delayed", "e5m2:tensor+delayed", GEMMS,
            "one scale per tensor from its history",
        ),
        Recipe("fp8-rowwise", "e4m3:row:pow2", "e4m3:row:pow2", "e4m3:row:pow2", GEMMS, "power-of-two row scales"),
        Recipe("fp8-blockwise", "e4m3:128x128", _E4M3_BLOCK, _E4M3_BLOCK, GEMMS, "DeepSeek-V3's tiles"),
        Recipe("mxfp8", "mxfp8_e4m3:rceil", "mxfp8_e4m3:rceil", "mxfp8_e4m3:rceil", GEMMS, "OCP blocks of 32"),
        Recipe(
            "mxfp4", "mxfp4:even+hadamard16", "mxfp4:even+hadamard16", _MX_GRAD, GEMMS,
            "4-bit GEMMs; both operands of dgrad and wgrad rounded stochastically", _MX_GRAD,
        ),
        Recipe("nf4", "nf4:block64+dq", "none", "none", GEMMS, "4-bit frozen storage, bf16 compute (QLoRA)"),
        Recipe("int4", "int4:group128", "none", "none", GEMMS, "4-bit frozen storage, bf16 compute"),
        Recipe("q8_0", "q8_0", "none", "none", GEMMS, "train in the GGUF grid you deploy"),
        Recipe("q4_0", "q4_0", "none", "none", GEMMS, "train in the GGUF grid you deploy"),
        # only forward has two low-precision operands; the backward differentiates straight through the same codes
        Recipe("bitnet", "ternary", "int8:row", "none", GEMMS, "ternary weights, int8 activations"),
    )
}  # fmt: skip


def recipe(name: str) -> Policy:
    """The policy of a named recipe.  Raises QuantError with the nearest name."""
    if name not in RECIPES:
        near = get_close_matches(name, RECIPES, n=1)
        raise QuantError(
            f"there is no recipe {name!r}" + (f"; did you mean {near[0]!r}?" if near else ""),
            fix="recipes: " + ", ".join(RECIPES),
        )
    return RECIPES[name].policy()


def available() -> dict[str, str]:
    """Recipe name → empty string where this version can run it, or why it cannot."""
    return {name: why_not(row.policy()) for name, row in RECIPES.items()}


def why_not(policy: Policy) -> str:
    """Why this version cannot run a policy; empty where it can."""
    for rule in policy.rules:
        if rule.spec is not None and rule.role in UNBUILT_ROLES:
            return f"the role {rule.role} ({rule.spec}) is not built in this version"
    for spec in sorted(policy.specs(), key=str):
        try:
            require_operand(spec)
        except QuantError as error:
            return error.what
    return ""


def check_available(policy: Policy) -> None:
    """Raise QuantError where the policy names something that parses but is not built in this version."""
    why = why_not(policy)
    if why:
        ready = ", ".join(name for name, missing in available().items() if not missing)
        raise QuantError(f"recipe {policy.name!r} parses but cannot run: {why}", fix=f"recipes that run: {ready}")
