"""Are ours and the independent implementation the same arithmetic?  Checked on the tensors of real training steps.

In the first three steps of a run of ours, every quantised layer is watched: its input, its output's gradient, its
weight.  From these raw tensors both implementations make the operands of all products, which must be equal bit for bit;
and the layer's real results (y, dx, dW) are compared with the products of the independent operands, so that it is also
seen that the layer used what its plan says.  Products may differ by the order of their sums: `products` counts the
bit-equal ones, `difference` is the largest share of values in which one of the rest differs, rounded to bf16.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from lumen.bench.loss_gap import independent
from lumen.bench.loss_gap.bases import Base
from lumen.bench.loss_gap.cases import NOT_COMPARED, Case
from lumen.bench.loss_gap.train import Stepper, order_of, prepare
from lumen.formats import QuantSpec
from lumen.quant import gemm
from lumen.quant.linear import QuantLinear
from lumen.quant.live import NOTHING, Live

STEPS = 3
CLOSE = 0.01
"""Products of equal operands differ in fewer of their values: sums in another order flip the last bit of a bf16 result
now and then (measured: 1 in 1000 of int8's), another operand changes nearly all."""


def compare(base: Base, case: Case, *, rows: int = 2) -> dict[str, Any]:
    """Run three steps of ours on `rows` rows each and compare.  Cases of NOT_COMPARED are not."""
    if case.name in NOT_COMPARED:
        return {"comparable": False, "equal": False, "why": NOT_COMPARED[case.name]}
    if not independent.has_scheme(case.name):
        return {"comparable": False, "equal": False, "why": "no independent implementation"}
    originals = {plain: m.weight.detach().clone() for plain, m in _linears(base.model())}
    model = prepare(base, case, "ours", seed=0)
    watch = _Watch(case, base.settings.frozen, originals)
    for name, layer in _linears(model):
        if isinstance(layer, QuantLinear):
            watch.add(name, layer)
    stepper, order = Stepper(model, base), order_of(base, STEPS * rows, seed=0)
    model.train()
    for step in range(STEPS):
        chosen = order[step * rows : (step + 1) * rows]
        watch.step = step
        stepper.step(base.ids[chosen], base.labels[chosen])
    return watch.result()


def _linears(model: Any) -> Iterator[tuple[str, Any]]:
    """nn.Linear layers of the bare model under their plain names."""
    from lumen.quant.modules import plain_name

    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and ".lora_" not in name:
            yield plain_name(name), module


class _Watch:
    def __init__(self, case: Case, frozen: bool, originals: dict[str, Tensor]) -> None:
        self.case, self.frozen, self.originals = case, frozen, originals
        self.made: dict[str, independent.Operands] = {}
        self.equal = self.operands = self.same = self.products = 0
        self.difference = 0.0
        self.unequal: dict[str, int] = {}
        self.step = 0

    def add(self, name: str, layer: QuantLinear) -> None:
        made = self.made[name] = independent.Operands(independent.scheme(self.case.name), self.frozen)
        seen: dict[str, Tensor] = {}
        pairs: dict[str, tuple[Tensor, Tensor]] = {}

        def weight() -> Tensor:
            return self.originals[name] if self.frozen else layer.weight.detach()

        def forward(module: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
            x = inputs[0].detach()
            if torch.is_autocast_enabled("cpu"):
                x = x.to(torch.bfloat16)
            x = seen["x"] = x.reshape(-1, x.shape[-1])
            made.begin(training=True)
            left, right = made.forward(x, weight())
            self._operands("forward", ours_operands(layer, "forward", x, None, weight()), (left, right), x.dtype)
            exact = made.scheme.exact and made.scheme.forward
            self._product("forward", output.detach().reshape(-1, layer.out_features), left, right.t(), exact)
            if output.requires_grad:
                output.register_hook(lambda dy: backward(dy.detach().reshape(-1, dy.shape[-1])))

        def backward(dy: Tensor) -> None:
            x = seen["x"]
            pairs["dgrad"] = made.dgrad(dy, weight())
            self._operands("dgrad", ours_operands(layer, "dgrad", x, dy, weight()), pairs["dgrad"], dy.dtype)
            if not self.frozen:
                pairs["wgrad"] = made.wgrad(dy, x)
                self._operands("wgrad", ours_operands(layer, "wgrad", x, dy, weight()), pairs["wgrad"], dy.dtype)

        def gradient(module: Any, grad_input: tuple[Any, ...], grad_output: tuple[Any, ...]) -> None:
            if grad_input and grad_input[0] is not None:
                dx = grad_input[0].detach().reshape(-1, layer.in_features)
                self._product("dgrad", dx, *pairs["dgrad"], made.scheme.exact)

        layer.register_forward_hook(forward)
        layer.register_full_backward_hook(gradient)
        if not self.frozen:

            def weight_gradient(dw: Tensor) -> None:
                left, right = pairs["wgrad"]
                self._product("wgrad", dw.detach(), left.t(), right, made.scheme.exact)

            layer.weight.register_hook(weight_gradient)

    def _operands(self, where: str, ours: tuple[Tensor, Tensor], theirs: tuple[Tensor, Tensor], dtype: Any) -> None:
        for side, a, b in zip(("left", "right"), ours, theirs, strict=True):
            self.operands += 1
            if torch.equal(a.to(dtype), b.to(dtype)):
                self.equal += 1
            else:
                self.unequal[f"{where} {side}"] = self.unequal.get(f"{where} {side}", 0) + 1

    def _product(self, where: str, ours: Tensor, left: Tensor, right: Tensor, exact: bool) -> None:
        with torch.no_grad():
            dtype = left.dtype if left.dtype == torch.bfloat16 else torch.bfloat16
            theirs = independent.product(left, right, dtype, exact)
        self.products += 1
        if torch.equal(ours.to(dtype), theirs):
            self.same += 1
        else:
            self.difference = max(self.difference, float((ours.to(dtype) != theirs).float().mean()))

    def result(self) -> dict[str, Any]:
        return {
            "comparable": True,
            "equal": self.equal == self.operands > 0 and self.difference < CLOSE,
            "operands": [self.equal, self.operands],
            "unequal": self.unequal,
            "products": [self.same, self.products],
            "difference": self.difference,
        }


def ours_operands(layer: QuantLinear, name: str, x: Tensor, dy: Tensor | None, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The operands that Lumen's codecs make for one product of a layer, by its plan; fp32 or untouched.

    weight: the master, or the weight that a frozen layer was made from.
    """
    plan = layer.plan
    product = plan.gemm(name)
    live = Live.of(plan, layer._live(), False)

    def encoded(t: Tensor, spec: QuantSpec, contract: int, role: str) -> gemm.Codes:
        stored = role == "weight" and plan.stores_codes  # once, outside any step
        return gemm.encode_operand(t, spec, contract, role, NOTHING if stored else live)

    def through(t: Tensor, spec: QuantSpec | None, contract: int, role: str) -> Tensor:
        if spec is None:
            return t
        return gemm.decode_operand(encoded(t, spec, contract, role), spec, _shape(t), contract, torch.float32)

    if name == "forward":
        return through(x, product.left, 1, "input"), through(weight, product.right, 1, "weight")
    assert dy is not None
    if name == "wgrad":
        return through(dy, product.left, 0, "grad_output"), through(x, product.right, 0 if product.left else 1, "input")
    if product.right is None:
        return through(dy, product.left, 1, "grad_output"), weight
    if not gemm.shares_codes(plan):
        return through(dy, product.left, 1, "grad_output"), through(weight, product.right, 0, "weight")
    spec = plan.forward.right
    assert spec is not None
    codes = encoded(weight, spec, 1, "weight")
    if product.how == "int8" and codes[1].ndim:
        return through(dy * codes[1].reshape(1, -1), product.left, 1, "grad_output"), codes[0].float()
    dense = gemm.decode_operand(codes, spec, _shape(weight), 1, torch.float32)
    return through(dy, product.left, 1, "grad_output"), dense


def _shape(weight: Tensor) -> tuple[int, int]:
    return weight.shape[0], weight.shape[1]
