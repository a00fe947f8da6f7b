"""The `quant:` section: a recipe's name, or specs by role, then rules that override them."""

from __future__ import annotations

from typing import Literal

from lumen.core import Config


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

    gemms: list[Literal["forward", "dgrad", "wgrad"]] | None = None
    """The GEMMs the rule is for. Default: all."""


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

    gemms: list[Literal["forward", "dgrad", "wgrad"]] | None = None
    """GEMMs in low precision. Default: the recipe's."""

    rules: list[QuantRule] = []
    """Rules before the recipe's own. Default: none."""


class QuantConfig(Config):
    """The quantisation policy of a run."""

    quant: QuantSection = QuantSection()
    """Recipe, roles and rules. Default: recipe bf16."""
