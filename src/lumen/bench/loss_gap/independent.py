"""The same schemes in a bare fake-quant layer: what ours is measured against.

A scheme says which operand of which product passes through which of `plain_formats`' functions.  The rules are the
documented ones:

- an operand's scales run along the dimension its product contracts over, so it is quantised anew for each product;
- a frozen weight that forward quantises has one set of values, used in dgrad too (mxfp4 rounds them once more, at
  random); int8 then folds the weight's scale per output into dy before it is quantised;
- where the other operand of a product stays in high precision, weight and input keep forward's values: plain
  straight-through fake quantisation.

Products of quantised operands run in the input's dtype, two int8 operands in fp32 (their sums are exact integers times
two scales).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from lumen.bench.loss_gap import plain_formats as fake
from lumen.bench.loss_gap.plain_formats import Fake


@dataclass(frozen=True)
class Scheme:
    """weight, input, grad: fake-quantiser of the role, or None.  backward: another one for weight and input in dgrad
    and wgrad.  forward: whether the forward product is quantised.  exact: products of two operands run in fp32, and a
    frozen weight's scales are folded.  delayed: FP8 type of each role (weight, input, grad) whose scale comes from the
    steps before; it stands in for the three fake-quantisers.  smooth: SmoothQuant's alpha; the factors are measured on
    the first input that a layer sees."""

    weight: Fake | None = None
    input: Fake | None = None
    grad: Fake | None = None
    backward: Fake | None = None
    forward: bool = True
    exact: bool = False
    delayed: tuple[torch.dtype, torch.dtype, torch.dtype] | None = None
    smooth: float | None = None


_INT8 = fake.int8_row
_E4M3, _E5M2 = fake.fp8_tensor, fake.e5m2_tensor


def _fixed() -> dict[str, Scheme]:
    blocks, mx = fake.e4m3_1x128, fake.mxfp8
    return {
        "int8": Scheme(_INT8, _INT8, _INT8, exact=True),
        "int8-backward": Scheme(_INT8, _INT8, _INT8, forward=False, exact=True),
        "int8-smooth": Scheme(_INT8, _INT8, _INT8, exact=True, smooth=0.7),
        "int8-weight-only": Scheme(weight=_INT8),
        "fp8": Scheme(_E4M3, _E4M3, _E5M2),
        "fp8-delayed": Scheme(delayed=(torch.float8_e4m3fn, torch.float8_e4m3fn, torch.float8_e5m2)),
        "fp8-rowwise": Scheme(fake.e4m3_row_pow2, fake.e4m3_row_pow2, fake.e4m3_row_pow2),
        "fp8-blockwise": Scheme(fake.e4m3_128x128, blocks, blocks),
        "mxfp8": Scheme(mx, mx, mx),
        "nf4": Scheme(weight=fake.nf4_double),
        "int4": Scheme(weight=fake.int4_group128),
        "q8_0": Scheme(weight=fake.q8_0),
        "q4_0": Scheme(weight=fake.q4_0),
        "bitnet": Scheme(weight=fake.ternary, input=_INT8),
        "int8 weights": Scheme(weight=_INT8),
        "int8 activations": Scheme(input=_INT8),
        "int8 gradients": Scheme(grad=_INT8),
        "fp8 weights": Scheme(weight=_E4M3),
        "fp8 activations": Scheme(input=_E4M3),
        "fp8 gradients": Scheme(grad=_E5M2),
        "mxfp8 weights": Scheme(weight=mx),
        "mxfp8 activations": Scheme(input=mx),
        "mxfp8 gradients": Scheme(grad=mx),
    }


def has_scheme(case: str) -> bool:
    """Whether this file knows the case."""
    return case in _fixed() or case in _MADE


def scheme(case: str, seed: int = 0) -> Scheme:
    """The scheme of a case; `seed` starts the random numbers of those that draw some."""
    return _MADE[case](seed) if case in _MADE else _fixed()[case]


def _mxfp4(seed: int) -> Scheme:
    generator = torch.Generator().manual_seed(1000 + seed)
    even = fake.rotated(fake.mxfp4_even)
    drawn = fake.rotated(lambda x: fake.mxfp4_stochastic(x, generator))
    return Scheme(even, even, drawn, backward=drawn)


_MADE: dict[str, Callable[[int], Scheme]] = {"mxfp4": _mxfp4}


def transposed(f: Fake, x: Tensor) -> Tensor:
    """`f` with scales along dimension 0."""
    return f(x.t().contiguous()).t()


def product(a: Tensor, b: Tensor, dtype: torch.dtype, exact: bool) -> Tensor:
    """a · b in fp32 or in `dtype`; the result in `dtype`."""
    with torch.autocast("cpu", enabled=False):  # which would make a bf16 product of an fp32 one
        if exact:
            return (a.float() @ b.float()).to(dtype)
        return a.to(dtype) @ b.to(dtype)


Pair = tuple[Tensor, Tensor]


class History:
    """Delayed scales of one layer: the largest amax of up to 1024 earlier steps, of the tensor itself in the first.

    A step's own amax becomes an entry when the next forward pass begins, in training passes only, and never where it is
    zero or not finite.
    """

    def __init__(self) -> None:
        self.past: dict[str, list[float]] = {}
        self.seen: dict[str, float] = {}
        self.training = True

    def begin(self, training: bool) -> None:
        """A forward pass: what the step before has seen is history now."""
        for role, amax in self.seen.items():
            if 0 < amax < float("inf"):
                self.past[role] = [*self.past.get(role, []), amax][-1024:]
        self.seen, self.training = {}, training

    def fake(self, role: str, dtype: torch.dtype) -> Fake:
        """The fake-quantiser of a role."""

        def run(x: Tensor) -> Tensor:
            amax = float(x.abs().max())
            if self.training:
                self.seen[role] = max(amax, self.seen.get(role, 0.0))
            used = torch.tensor(max(self.past.get(role) or [amax]))
            return fake.fp8_scaled(x.float(), used / torch.finfo(dtype).max, dtype)

        return run


class Operands:
    """What the three products of one layer multiply: values as the format holds them, or the tensor untouched.

    The values of a frozen weight are made once.
    """

    def __init__(self, scheme: Scheme, frozen: bool) -> None:
        self.history = History()
        if scheme.delayed is not None:
            weight, x, dy = (
                self.history.fake(role, dtype) for role, dtype in zip(("w", "x", "dy"), scheme.delayed, strict=True)
            )
            scheme = replace(scheme, weight=fake.fp8_tensor if frozen else weight, input=x, grad=dy)
        self.scheme, self.frozen = scheme, frozen
        self._kept: dict[str, Tensor] = {}
        self.factors: Tensor | None = None

    def _smooth(self, x: Tensor, weight: Tensor) -> None:
        """SmoothQuant's factor of every input channel, from the first input."""
        if self.scheme.smooth is not None and self.factors is None:
            most_x, most_w = x.abs().amax(0).float(), weight.abs().amax(0).float()
            s = most_x**self.scheme.smooth / most_w ** (1 - self.scheme.smooth)
            self.factors = torch.where((most_x > 0) & (most_w > 0), s, 1.0)

    def begin(self, training: bool) -> None:
        """Before each forward pass."""
        self.history.begin(training)

    def _weight(self, name: str, weight: Tensor, make: Callable[[Tensor], Tensor]) -> Tensor:
        if not self.frozen:
            return make(weight)
        if name not in self._kept:
            self._kept[name] = make(weight)
        return self._kept[name]

    def stored_weight(self, weight: Tensor) -> Tensor:
        """weight [N, K] as forward reads it, times the factors of smoothing.  Kept values that are multiplied in the
        weight's own dtype are rounded to it."""
        s = self.scheme
        if not s.forward or s.weight is None:
            return weight
        fake = s.weight
        if self.factors is not None:
            by = self.factors
            return self._weight("forward", weight, lambda w: fake(w.float() * by))
        return self._weight("forward", weight, fake if s.exact else lambda w: fake(w).to(w.dtype))

    def forward(self, x: Tensor, weight: Tensor) -> Pair:
        """x [M, K] and weight [N, K], to be contracted over K."""
        s = self.scheme
        self._smooth(x, weight)
        if self.factors is not None:
            x = x.float() / self.factors
        return (s.input(x) if s.input and s.forward else x), self.stored_weight(weight)

    def dgrad(self, dy: Tensor, weight: Tensor) -> Pair:
        """dy [M, N] and weight [N, K], to be contracted over N."""
        s = self.scheme
        if s.weight is None:
            return (s.grad(dy) if s.grad else dy), weight
        if s.forward and self.frozen and s.exact and s.grad:
            # W = scale · codes per output: fold the scale into dy, quantise that, multiply by the codes
            by = 1.0 if self.factors is None else self.factors
            scale = self._weight("scale", weight, lambda w: (w.float() * by).abs().amax(1) / 127)
            scale = torch.where(scale == 0, 1.0, scale)
            codes = self._weight("codes", weight, lambda w: (w.float() * by / scale[:, None]).round())
            return s.grad(dy.float() * scale), codes
        left = s.grad(dy) if s.grad else dy
        if s.backward is not None:  # drawn anew each time, of a frozen weight from the values that are stored
            return left, transposed(s.backward, self.stored_weight(weight) if self.frozen else weight)
        if s.forward and (self.frozen or s.grad is None):
            return left, self.stored_weight(weight)
        fake = s.weight
        return left, self._weight("dgrad", weight, lambda w: transposed(fake, w))

    def unsmooth(self, values: Tensor) -> Tensor:
        """Columns [·, K] made from a frozen smoothed weight, over the factors."""
        if self.factors is None or not self.frozen:
            return values
        return (values.float() / self.factors).to(values.dtype)

    def wgrad(self, dy: Tensor, x: Tensor) -> Pair:
        """dy [M, N] and x [M, K], to be contracted over M."""
        s = self.scheme
        left = transposed(s.grad, dy) if s.grad else dy
        if s.input is None:
            return left, x
        if s.forward and s.grad is None:
            return left, s.input(x)
        return left, transposed(s.backward or s.input, x)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, layer: FakeQuantLinear) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.layer = layer
        a, b = layer.operands.forward(x, weight)
        s = layer.operands.scheme
        return product(a, b.t(), x.dtype, s.exact and s.forward)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        (dy,) = grads
        x, weight = ctx.saved_tensors
        made: Operands = ctx.layer.operands
        exact = made.scheme.exact
        dx = None
        if ctx.needs_input_grad[0]:
            dx = made.unsmooth(product(*made.dgrad(dy, weight), dy.dtype, exact))
        dw = None
        if not made.frozen:
            left, right = made.wgrad(dy, x)
            dw = product(left.t(), right, dy.dtype, exact).to(weight.dtype)
        return dx, dw, None


class FakeQuantLinear(nn.Linear):
    """nn.Linear with fake-quantised products.  `enabled = False` evaluates in high precision, a frozen weight as its
    stored values."""

    operands: Operands
    enabled: bool = True

    @classmethod
    def over(cls, linear: nn.Linear, scheme: Scheme, frozen: bool) -> FakeQuantLinear:
        """The fake-quantised twin of a layer, with its parameters."""
        with torch.device("meta"):
            layer = cls(linear.in_features, linear.out_features, bias=linear.bias is not None)
        layer.weight, layer.bias = linear.weight, linear.bias
        layer.operands = Operands(scheme, frozen)
        return layer

    def forward(self, input: Tensor) -> Tensor:
        """input [..., K] → [..., N]."""
        x = input
        if torch.is_autocast_enabled("cpu"):
            x = x.to(torch.get_autocast_dtype("cpu"))
        flat = x.reshape(-1, self.in_features)
        self.operands.begin(self.training)
        if self.enabled:
            y = _Product.apply(flat, self.weight, self)
        else:
            made = self.operands
            weight = made.unsmooth(made.stored_weight(self.weight)) if made.frozen else self.weight
            y = flat @ weight.to(flat.dtype).t()
        y = y.reshape(*x.shape[:-1], self.out_features)
        return y if self.bias is None else y + self.bias.to(y.dtype)


def fake_quantise(model: nn.Module, case: str, *, frozen: bool, seed: int = 0) -> int:
    """Exchange every linear layer but the output head, in place; returns how many."""
    s = scheme(case, seed)
    head = model.get_output_embeddings()  # type: ignore[operator]
    found = [(name, m) for name, m in model.named_modules() if type(m) is nn.Linear and m is not head]
    for name, linear in found:
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, FakeQuantLinear.over(linear, s, frozen))
    return len(found)


def enable(model: nn.Module, on: bool) -> None:
    """Switch fake quantisation of every layer on or off."""
    for module in model.modules():
        if isinstance(module, FakeQuantLinear):
            module.enabled = on
