"""SQNR of the three GEMMs of every recipe against fp64, with a random dY.

If the noise of two operands is independent, the noise-to-signal ratios of a product's operands add:

    SQNR of the product ≥ -10·log10(NSR_a + NSR_b)

with the ratios of each operand quantised alone from high precision along the dimension it is contracted over.  A layer
that scales by the wrong operand's scale, requantises what was quantised, or contracts over the wrong blocks falls
below; 1 dB is allowed.  `y.sum().backward()` would hide all of this: its dY is all ones, exact in every format.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from lumen.bench.numerics import measure as m
from lumen.core import QuantError
from lumen.formats import Noise, QuantSpec, decode, encode
from lumen.quant import QuantLinear, quantize, recipes
from lumen.quant.gemm import shares_codes
from lumen.quant.policy import GEMMS

LENGTHS = (64, 77, 256, 1000, 4096)
"""Lengths of the contraction; two of them fit no block."""
QUICK_LENGTHS = (77,)
ALLOWED = -1.0
"""dB that a product may lie below its bound."""
_VALUES = 300
"""Draws are added up until the contraction has run over so many values: a few outlier channels are a small sample."""


@dataclass(frozen=True)
class Product:
    """One measured GEMM.  sqnr, bound: dB."""

    recipe: str
    frozen: bool
    gemm: str
    length: int
    outliers: bool
    sqnr: float
    bound: float

    @property
    def margin(self) -> float:
        return self.sqnr - self.bound


def ready() -> list[str]:
    """Recipes that this version runs and that quantise something."""
    return [name for name, why in recipes.available().items() if not why and name != "bf16"]


def products(recipe: str, lengths: tuple[int, ...] = LENGTHS) -> Iterator[Product]:
    """Every GEMM of a recipe with a low-precision operand: trained and frozen weight, each length, with outliers."""
    for frozen in (False, True):
        for gemm in GEMMS[: 2 if frozen else 3]:
            for length in lengths:
                for hard in (False, True):
                    found = _product(recipe, frozen, gemm, length, hard)
                    if found is not None:
                        yield found


def _product(recipe: str, frozen: bool, gemm: str, length: int, hard: bool) -> Product | None:
    exact = error = noise_a = noise_b = 0.0
    draws = -(-_VALUES // length)
    for draw in range(draws):
        one = _one(recipe, frozen, gemm, length, hard, 10 * draw)
        if one is None:
            return None
        exact, error = exact + one[0], error + one[1]
        noise_a, noise_b = noise_a + one[2] / draws, noise_b + one[3] / draws
    return Product(
        recipe, frozen, gemm, length, hard, 10 * math.log10(exact / error), -10 * math.log10(noise_a + noise_b)
    )


def _channels(x: torch.Tensor) -> torch.Tensor:
    """x with one channel in 16 scaled by 30."""
    x = x.clone()
    x[:, ::16] *= 30
    return x


def _one(
    recipe: str, frozen: bool, gemm: str, length: int, hard: bool, seed: int
) -> tuple[float, float, float, float] | None:
    """One draw: energy of the exact product and of its error, noise-to-signal ratios of the operands."""
    tokens, inputs, outputs = {"forward": (64, length, 48), "dgrad": (64, 96, length), "wgrad": (length, 96, 48)}[gemm]
    linear = nn.Linear(inputs, outputs, bias=False).requires_grad_(not frozen)
    weight = m.gaussian(outputs, inputs, seed=seed + 1) / inputs**0.5
    linear.weight.data.copy_(weight)
    x, dy = m.gaussian(tokens, inputs, seed=seed + 2), m.gaussian(tokens, outputs, seed=seed + 3)
    if hard:  # in one operand: two would put all of dW's energy into a few numbers
        x, dy = (x, _channels(dy)) if gemm == "dgrad" else (_channels(x), dy)
    box = nn.Sequential(linear)
    try:
        quantize(box, recipe)
    except QuantError:  # ggml's rows must be whole blocks
        return None
    layer = box[0]
    assert isinstance(layer, QuantLinear)
    if layer.pending is not None:  # smoothing measures its first input
        layer(x)
    plan = layer.plan.gemm(gemm)
    if plan.how == "none":
        return None
    s = layer.smooth if layer.plan.smoothed else torch.ones(inputs)
    x.requires_grad_(True)
    y = layer(x)
    y.backward(dy)
    exact_x = x.detach()
    a, w, b = dy.double(), weight.double(), exact_x.double()
    spec_a, spec_b = plan.left, plan.right
    if gemm == "forward":
        want, got, noise = b @ w.t(), y, (_noise(exact_x / s, spec_a, 1), _noise(weight * s, spec_b, 1))
    elif gemm == "dgrad":
        noise = _noise(_folded(dy, weight * s, layer), spec_a, 1), _of_weight(weight, s, layer)
        want, got = a @ w, x.grad
    else:  # where dY stays in high precision, x keeps forward's groups
        want, got = a.t() @ b, linear.weight.grad
        noise = _noise(dy, spec_a, 0), _noise(exact_x, spec_b, 0 if spec_a else 1)
    assert got is not None
    return float(want.square().sum()), float((got.detach().double() - want).square().sum()), *noise


def _folded(dy: torch.Tensor, weight: torch.Tensor, layer: QuantLinear) -> torch.Tensor:
    """dgrad's left operand: a frozen int8 weight has a scale per contracted output, which is folded into dY."""
    spec = layer.plan.forward.right
    if layer.plan.dgrad.how != "int8" or not shares_codes(layer.plan) or spec is None or spec.granularity.kind != "row":
        return dy
    return dy * encode(weight, spec)[1]["scale"].reshape(1, -1)


def _of_weight(weight: torch.Tensor, s: torch.Tensor, layer: QuantLinear) -> float:
    """Noise of dgrad's weight: forward's codes (of W·s), its own, or such made from a frozen one's codes."""
    plan, own = layer.plan, layer.plan.dgrad.right
    if own is None or (shares_codes(plan) and plan.forward.right is None):
        return 0.0
    if shares_codes(plan):
        assert plan.forward.right is not None
        return m.noise_ratio(weight, _trip(weight * s, plan.forward.right, 1) / s)
    if plan.fresh and plan.stores_codes:
        assert plan.forward.right is not None
        return m.noise_ratio(weight, _trip(_trip(weight * s, plan.forward.right, 1) / s, own, 0))
    return _noise(weight, own, 0)


def _noise(x: torch.Tensor, spec: QuantSpec | None, contract: int) -> float:
    """Noise-to-signal ratio of one operand, quantised alone."""
    return 0.0 if spec is None else m.noise_ratio(x, _trip(x, spec, contract))


def _trip(x: torch.Tensor, spec: QuantSpec, contract: int) -> torch.Tensor:
    """x after its round trip with groups along dimension `contract`."""
    spec = spec.with_(scaling="dynamic", transform="none" if spec.transform == "smooth" else spec.transform)
    noise = Noise("probe") if spec.rounding == "stochastic" else None
    x = x if contract == 1 else x.t()
    back = decode(*encode(x, spec, noise=noise), spec, x.shape)
    return back if contract == 1 else back.t()
