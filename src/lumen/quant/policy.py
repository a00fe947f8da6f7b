"""Policy: ordered rules that say how each operand of each layer is quantised.

A rule is: module glob × role × GEMM → spec, or none.  The first rule that matches wins.  Globs match whole dotted
names, so `model.layers.1` is not `model.layers.10`, and `*` crosses dots: `model.layers.1.*` is everything in layer 1.

A linear layer y = x·Wᵀ runs three GEMMs, each with two operands:

    forward   y  = x · Wᵀ      input, weight
    dgrad     dx = dy · W      grad_output, weight
    wgrad     dW = dyᵀ · x     grad_output, input

so "weight only", "activation only", "gradient only" and every combination is one rule per role.  Where one operand of a
GEMM is none the other is dequantised and the product runs in the compute dtype.

Output head, embeddings, norms and routers stay in high precision unless a rule *names* them: its glob ends in a
component with at least one letter (`lm_head`, `*.gate`), not in a bare `*`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

from lumen.core import QuantError
from lumen.formats import QuantSpec
from lumen.formats.codec import require_built
from lumen.quant.scaling import DEFAULT, Delayed

GEMMS = ("forward", "dgrad", "wgrad")
OPERANDS = ("weight", "input", "grad_output")
ROLES = (*OPERANDS, "saved_input", "optimizer_state", "grad_comm", "weight_comm")
UNBUILT_ROLES = ("optimizer_state", "grad_comm", "weight_comm")
"""Roles that a rule may name but that nothing acts on yet: a policy that quantises one is refused."""
OF_GEMM = {
    "forward": ("input", "weight"),
    "dgrad": ("grad_output", "weight"),
    "wgrad": ("grad_output", "input"),
}
"""The two operands of each GEMM."""


@dataclass(frozen=True)
class Rule:
    """match: glob on whole dotted module names.  role, gemm: one name, or `*`.  spec: None keeps high precision.

    `required` rules come from a user and must match some module; a recipe's own rules need not.
    """

    match: str
    role: str
    gemm: str
    spec: QuantSpec | None
    required: bool = False

    def __post_init__(self) -> None:
        if self.role not in (*ROLES, "*"):
            raise QuantError(f"there is no role {self.role!r}", where=f"rule for {self.match!r}", fix=_of(ROLES))
        if self.gemm not in (*GEMMS, "*"):
            raise QuantError(f"there is no GEMM {self.gemm!r}", where=f"rule for {self.match!r}", fix=_of(GEMMS))

    def covers(self, module: str, role: str, gemm: str) -> bool:
        return self.role in (role, "*") and self.gemm in (gemm, "*") and fnmatchcase(module, self.match)

    @property
    def names_module(self) -> bool:
        """Whether the glob names something, so that it reaches protected modules too."""
        return any(ch.isalnum() for ch in self.match.rpartition(".")[2])


@dataclass(frozen=True)
class Smoothing:
    """alpha: share of the outliers that the weight takes over.  target_db: output SQNR below which a layer is cut into
    groups along K.  batches: micro-batches that a run calibrates on."""

    alpha: float = 0.7
    target_db: float = 35.0
    batches: int = 4

    def __post_init__(self) -> None:
        if not 0 <= self.alpha <= 1 or self.batches < 1:
            raise QuantError("alpha is between 0 and 1 and batches at least 1", where="quant.smooth")


SMOOTHING = Smoothing()


@dataclass(frozen=True)
class Policy:
    """Ordered rules; `name` is for reports, `delayed` and `smoothing` set up `+delayed` and `+smooth`."""

    rules: tuple[Rule, ...] = ()
    name: str = "custom"
    delayed: Delayed = DEFAULT
    smoothing: Smoothing = SMOOTHING

    def spec(self, module: str, role: str, gemm: str = "forward", *, protected: bool = False) -> QuantSpec | None:
        """The spec of one operand.  `protected` modules listen only to rules that name them."""
        for rule in self.rules:
            if rule.covers(module, role, gemm) and (rule.names_module or not protected):
                return rule.spec
        return None

    def specs(self) -> set[QuantSpec]:
        """Every spec that some rule may give."""
        return {rule.spec for rule in self.rules if rule.spec is not None}

    def check_matches(self, modules: Iterable[str]) -> None:
        """Raise QuantError for a required rule whose glob matches none of `modules`."""
        names = list(modules)
        for rule in self.rules:
            if rule.required and not any(fnmatchcase(name, rule.match) for name in names):
                near = ", ".join(get_close_matches(rule.match, names, n=3, cutoff=0.0)) or "no linear layer here"
                raise QuantError(
                    f"the rule {rule.match!r} matches no module",
                    where="quant.rules",
                    fix=f"globs match whole dotted names; the nearest: {near}",
                )

    def summary(self) -> str:
        """One line per rule."""
        return "\n".join(f"{r.match} {r.role} {r.gemm} -> {r.spec.full() if r.spec else 'none'}" for r in self.rules)


@dataclass
class PolicyBuilder:
    """Collects rules from the keys of a YAML section, a dict or a recipe's table row."""

    rules: list[Rule] = field(default_factory=list)

    def add(
        self,
        specs: Mapping[str, Any],
        *,
        match: str = "*",
        gemms: Iterable[str] = GEMMS,
        required: bool = False,
    ) -> PolicyBuilder:
        """specs: role → text, QuantSpec, or none/None.  For operands the rule speaks about `gemms` only."""
        gemms = tuple(gemms)
        for gemm in gemms:
            if gemm not in GEMMS:
                raise QuantError(f"there is no GEMM {gemm!r}", where="quant.gemms", fix=_of(GEMMS))
        for role, text in specs.items():
            spec = parse_spec(text, role)
            if role in OPERANDS and set(gemms) != set(GEMMS):
                self.rules += [Rule(match, role, gemm, spec, required) for gemm in gemms]
            else:
                self.rules.append(Rule(match, role, "*", spec, required))
        return self

    def build(self, name: str = "custom", delayed: Delayed = DEFAULT, smoothing: Smoothing = SMOOTHING) -> Policy:
        return Policy(tuple(self.rules), name, delayed, smoothing)


def parse_spec(text: Any, role: str = "") -> QuantSpec | None:
    """A spec, or None for `none`, null and false (YAML's `off`)."""
    if text is None or text is False or (isinstance(text, str) and text.strip().lower() in ("none", "off", "bf16")):
        return None
    try:
        return QuantSpec.parse(text)
    except QuantError as error:
        raise QuantError(error.what, where=f"{role}: {text}" if role else str(text), fix=error.fix) from None


def require_operand(spec: QuantSpec, where: str = "") -> None:
    """Raise QuantError where this version cannot use a spec for an operand of a GEMM."""
    require_built(spec.with_(transform="none") if spec.transform == "smooth" else spec, where)


def _of(names: Iterable[str]) -> str:
    return "one of " + ", ".join(names)
