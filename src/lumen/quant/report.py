"""What quantising did, per layer and GEMM: the formats, the bytes, and whether the chip runs them natively.

native       the chip multiplies this format itself
emulated     the chip has no units for this format: the same numbers, computed in a wider type; right, not fast
fallback     the chip has the units, but no kernel of this version uses them here; computed as if emulated
dequantised  one operand is in high precision, so the other is dequantised and the product runs in the compute dtype
none         nothing is quantised here
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import nn

from lumen.core import QuantError
from lumen.formats import bits_per_value
from lumen.hardware import code_target
from lumen.kernels import select
from lumen.quant import recipes
from lumen.quant.experts import QuantStack
from lumen.quant.gemm import shares_codes
from lumen.quant.linear import QuantLinear
from lumen.quant.modules import left_alone, linear_layers, plain_name
from lumen.quant.plan import GemmPlan, plan_layer
from lumen.quant.policy import GEMMS, OF_GEMM
from lumen.quant.target import in_dialect, resolve, units

_EMULATED = "quantised, dequantised, multiplied in the compute dtype"


@dataclass(frozen=True)
class GemmReport:
    """left, right: the specs written out, or `none`.  kind: see the module's text.  why: one line."""

    gemm: str
    left: str
    right: str
    kind: str
    why: str


@dataclass(frozen=True)
class LayerReport:
    """One layer.  `stored`: spec of the stored weight, or the master's dtype.  `bytes_per_parameter` counts scales and,
    for a master, its cached codes."""

    name: str
    shape: tuple[int, ...]
    stored: str
    frozen: bool
    bytes_per_parameter: float
    gemms: tuple[GemmReport, ...]

    def settings(self) -> tuple[Any, ...]:
        """What layers must share to be told in one line."""
        return self.stored, self.frozen, self.gemms


@dataclass
class Report:
    """recipe, target chip, the quantised layers, and what stayed in high precision and why."""

    recipe: str
    target: str
    layers: list[LayerReport] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        if not self.layers:
            return f"recipe {self.recipe}: nothing is quantised"
        groups: dict[tuple[Any, ...], list[LayerReport]] = {}
        for layer in self.layers:
            groups.setdefault(layer.settings(), []).append(layer)
        lines = [f"recipe {self.recipe} on {self.target}: {len(self.layers)} linear layers"]
        for layers in groups.values():
            first = layers[0]
            names = first.name if len(layers) == 1 else f"{first.name} and {len(layers) - 1} like it"
            numel = sum(math.prod(x.shape) for x in layers)
            size = sum(x.bytes_per_parameter * math.prod(x.shape) for x in layers) / max(numel, 1)
            state = "frozen" if first.frozen else "trained"
            lines.append(f"  {names}: {state} weight as {first.stored}, {size:.2f} bytes per parameter")
            for g in first.gemms:
                lines.append(f"    {g.gemm:8} {g.left} × {g.right}: {g.kind} ({g.why})")
        reasons: dict[str, list[str]] = {}
        for name, why in self.skipped.items():
            reasons.setdefault(why, []).append(name)
        for why, skipped in reasons.items():
            shown = ", ".join(skipped[:3]) + (f" and {len(skipped) - 3} more" if len(skipped) > 3 else "")
            lines.append(f"  high precision: {shown} ({why})")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """For `--json` and the run's record."""
        return asdict(self)

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2)


def report(model: nn.Module, recipe: str = "as it is", target: str | None = None) -> Report:
    """Describe a model as it is now, for the chip its weights are on or for a named one (`gfx942`, `MI300X`, `cpu`).

    The operands' dialect was fixed when the model was quantised (`quantize(..., target=...)`).
    """
    parameter = next(model.parameters(), None)
    chip = resolve(target, "cpu" if parameter is None else parameter.device)
    result = Report(recipe, chip, skipped=left_alone(model))
    quantised = [(path, m) for path, m in _quantised(model)]
    result.layers = [layer_report(name, m, chip) for name, m in quantised]
    for found in linear_layers(model):
        result.skipped[found.name] = found.protected or "the policy says none"
    return result


def recipe_rows(target: str, *, frozen: bool) -> list[dict[str, str]]:
    """Every recipe on a named chip without a model: `recipe`, `stored`, and per GEMM its kind (`gemm`, `gemm why`).

    A recipe that this version cannot run has `missing` instead.  Raises HardwareError for a chip that is not known.
    """
    chip = code_target(target)
    rows = []
    for name, missing in recipes.available().items():
        row = {"recipe": name, "missing": missing}
        if not missing:
            plan = plan_layer(recipes.recipe(name), "layer", frozen=frozen, protected=False)
            plan = in_dialect(plan, chip)
            stored = plan.forward.right if plan.stores_codes else None
            row["stored"] = stored.full() if stored else "as it is"
            for gemm in GEMMS if not frozen else GEMMS[:2]:
                told = gemm_report(gemm, plan.gemm(gemm), plan.stores_codes, chip)
                row |= {gemm: told.kind, f"{gemm} operands": f"{told.left} × {told.right}", f"{gemm} why": told.why}
        rows.append(row)
    return rows


def _quantised(model: nn.Module) -> Iterable[tuple[str, QuantLinear | QuantStack]]:
    for path, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, (QuantLinear, QuantStack)):
            yield plain_name(path), module


def layer_report(name: str, layer: QuantLinear | QuantStack, target: str) -> LayerReport:
    """One layer's settings on a chip."""
    plan = getattr(layer, "pending", None) or layer.plan
    shape: tuple[int, ...] = (layer.out_features, layer.in_features)
    each = shape
    if isinstance(layer, QuantStack):
        shape = layer.shape
    numel = math.prod(shape)
    master = layer._parameters["weight"]
    assert master is not None
    parts = [master, *(b for b in layer._buffers.values() if b is not None)]
    size = sum(p.nbytes for p in parts)
    if not plan.stores_codes:
        own = [plan.forward.right, None if shares_codes(plan) else plan.dgrad.right]
        size += round(sum(bits_per_value(s, each) / 8 * numel for s in own if s is not None))
    stored = plan.forward.right.full() if plan.stores_codes and plan.forward.right else str(master.dtype)[6:]
    gemms = tuple(
        gemm_report(gemm, plan.gemm(gemm), plan.stores_codes, target, grouped=plan.groups(gemm) > 0)
        for gemm in GEMMS
        if not (gemm == "wgrad" and plan.frozen)
    )
    return LayerReport(name, shape, stored, plan.frozen, size / max(numel, 1), gemms)


def gemm_report(gemm: str, plan: GemmPlan, stored: bool, target: str, *, grouped: bool = False) -> GemmReport:
    """How one product runs on a chip and why.  grouped: as a sum of integer products over groups of K."""
    left, right = (spec.full() if spec else "none" for spec in (plan.left, plan.right))
    roles = OF_GEMM[gemm]
    if plan.how == "int8" or grouped:
        try:
            kernel = select("int8_matmul", target, "int8")
            kind, why = kernel.kind, kernel.why
        except QuantError as error:
            kind, why = "emulated", error.what
        if kind == "emulated" and units(plan.left, plan.right, target):
            kind, why = "fallback", f"{target} multiplies int8, but torch does not there: {why}"
    elif plan.how == "emulated":
        assert plan.left is not None and plan.right is not None
        element, pair = units(plan.left, plan.right, target), f"{plan.left.element} × {plan.right.element}"
        if element:
            kind, why = "fallback", f"{target} multiplies {element}, but no kernel of this version does: {_EMULATED}"
        else:
            kind, why = "emulated", f"{target} has no units for {pair}: {_EMULATED}"
    elif plan.how == "dequantised":
        high = roles[0] if plan.left is None else roles[1]
        kind, why = "dequantised", f"{high} is in high precision, so the product runs in the compute dtype"
    elif stored and "weight" in roles:
        kind, why = "dequantised", "the stored codes are dequantised"
    else:
        kind, why = "none", "both operands are in high precision"
    return GemmReport(gemm, left, right, kind, why)
