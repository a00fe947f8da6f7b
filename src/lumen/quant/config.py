"""The `quant:` section: a recipe's name, or specs by role, then rules that override them."""

from __future__ import annotations

from typing import Literal

from lumen.core import Config, QuantError
from lumen.quant import recipes
from lumen.quant.policy import GEMMS, Policy, PolicyBuilder, Smoothing
from lumen.quant.scaling import Delayed

Gemm = Literal["forward", "dgrad", "wgrad"]


class QuantRule(Config):
    """One rule; the first that matches wins."""

    match: str
    """Glob on whole dotted module names."""

    weight: str | None = None
    """Spec of the weight, or none."""

    input: str | None = None
    """Spec of the input, or none."""

    grad_output: str | None = None
    """Spec of the output's gradient, or none."""

    saved_input: str | None = None
    """Spec of the input that is kept for wgrad, or none."""

    gemms: list[Gemm] | None = None
    """The GEMMs the rule is for. Default: all."""


class DelayedSection(Config):
    """`quant.delayed:` how the scales of `+delayed` follow from earlier steps."""

    history: int = 1024
    """Steps that are remembered. Default: 1024."""

    margin: int = 0
    """Headroom above the history, in powers of two. Default: 0."""

    algorithm: Literal["max", "most_recent"] = "max"
    """The history's largest entry or its newest one. Default: max."""

    reduce: bool = False
    """Whether entries are the maximum over all ranks (one all-reduce per step). Default: false."""


class SmoothSection(Config):
    """`quant.smooth:` how `+smooth` is calibrated."""

    alpha: float = 0.7
    """Share of the outliers that the weight takes over, 0 to 1. Default: 0.7."""

    target_db: float = 35.0
    """Output SQNR in dB below which a layer is cut into groups along K. Default: 35."""

    batches: int = 4
    """Micro-batches of the training data to calibrate on. Default: 4."""


class QuantSection(Config):
    """`quant:`"""

    recipe: str = "bf16"
    """A named recipe. Default: bf16, nothing quantised."""

    weight: str | None = None
    """Spec of weights, or none. Default: the recipe's."""

    input: str | None = None
    """Spec of GEMM inputs, or none. Default: the recipe's."""

    grad_output: str | None = None
    """Spec of output gradients, or none. Default: the recipe's."""

    saved_input: str | None = None
    """Spec of the input that is kept for wgrad, or none. Default: the recipe's."""

    gemms: list[Gemm] | None = None
    """GEMMs in low precision. Default: the recipe's."""

    delayed: DelayedSection = DelayedSection()
    """History of delayed scales."""

    smooth: SmoothSection = SmoothSection()
    """Calibration of smoothing."""

    rules: list[QuantRule] = []
    """Rules before the recipe's own. Default: none."""

    target: str | None = None
    """Chip whose numbers are computed, such as gfx942 or MI300X (its FP8 operands are FNUZ). Default: the device's."""

    def policy(self) -> Policy:
        """Rules first, then the roles given here, then the recipe.  Raises QuantError.

        A role that is not given is the recipe's; `none` given is none.  `gemms` alone restricts the recipe.
        """
        builder = PolicyBuilder()
        for rule in self.rules:
            builder.add(_given(rule), match=rule.match, gemms=rule.gemms or GEMMS, required=True)
        base = recipes.recipe(self.recipe)
        own = _given(self)
        if self.gemms is not None:  # a restriction holds for the recipe's roles too
            for operand in ("weight", "input", "grad_output"):
                for gemm in GEMMS:
                    spec = own.get(operand, base.spec("*", operand, gemm)) if gemm in self.gemms else None
                    builder.add({operand: spec}, gemms=[gemm])
            own = {role: spec for role, spec in own.items() if role == "saved_input"}
        builder.add(own)
        builder.rules += base.rules
        name = self.recipe if len(builder.rules) == len(base.rules) else f"{self.recipe} with rules"
        delayed, smoothing = Delayed(**self.delayed.model_dump()), Smoothing(**self.smooth.model_dump())
        policy = builder.build(name, delayed, smoothing)
        for section, changed, used, example in (
            ("delayed", delayed != Delayed(), {s.scaling for s in policy.specs()}, "fp8-delayed"),
            ("smooth", smoothing != Smoothing(), {s.transform for s in policy.specs()}, "int8-smooth"),
        ):
            if changed and section not in used:
                raise QuantError(
                    f"no role of this policy is +{section}, so these settings would do nothing",
                    where=f"quant.{section}",
                    fix=f"use recipe: {example}, or a spec with +{section}",
                )
        return policy


def _given(section: QuantRule | QuantSection) -> dict[str, str | None]:
    roles = ("weight", "input", "grad_output", "saved_input")
    return {role: spec for role in roles if (spec := getattr(section, role)) is not None}


class QuantConfig(Config):
    """The quantisation policy of a run."""

    quant: QuantSection = QuantSection()
    """Recipe, roles and rules. Default: recipe bf16."""
