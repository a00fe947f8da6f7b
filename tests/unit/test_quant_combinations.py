"""Weight only, activation only, gradient only and every combination: what each of the three products really did."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest
import torch
from torch import nn

from lumen.core import QuantError
from lumen.kernels import trace
from lumen.quant import Policy, Rule, gemm, quantize
from lumen.quant.policy import OF_GEMM, parse_spec

ROLES = ("weight", "input", "grad_output")
FORMATS = {
    "int8": dict.fromkeys(ROLES, "int8:row"),
    "fp8": {"weight": "e4m3:tensor", "input": "e4m3:tensor", "grad_output": "e5m2:tensor"},
    "mxfp8": dict.fromkeys(ROLES, "mxfp8_e4m3:rceil"),
}
SUBSETS = [subset for size in (1, 2, 3) for subset in combinations(ROLES, size)]


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("subset", SUBSETS, ids="+".join)
@pytest.mark.parametrize("name", FORMATS)
def test_each_product_takes_what_was_asked(
    name: str, subset: tuple[str, ...], frozen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Watches every operand that is made (role, spec, contracted dimension), the dtype of its codes, and every integer
    product.  Fails if an option is ignored, if backward takes forward's format, or if a product runs in another one."""
    made: list[tuple[str, str, int]] = []
    dtypes: dict[str, set[torch.dtype]] = {}
    real = gemm.encode_operand

    def spy(x: torch.Tensor, spec: Any, contract: int, role: str = "weight", live: Any = gemm.NOTHING) -> Any:
        parts = real(x, spec, contract, role, live)
        made.append((role, str(spec), contract))
        dtypes.setdefault(role, set()).add(parts[0].dtype)
        return parts

    torch.manual_seed(0)
    box = nn.Sequential(nn.Linear(64, 96, bias=False))
    dense = box[0].weight.detach().clone()
    monkeypatch.setattr(gemm, "encode_operand", spy)
    quantize(box, {role: FORMATS[name][role] for role in subset}, frozen=frozen)
    x, dy = torch.randn(32, 64, requires_grad=True), torch.randn(32, 96)
    with trace() as calls:
        y = box(x)
        y.backward(dy)
    asked = {role: str(parse_spec(FORMATS[name][role])) for role in subset}
    has = {role: role in subset for role in ROLES}
    want: set[tuple[str, str, int]] = set()
    if has["weight"]:
        want.add(("weight", asked["weight"], 1))
        # dgrad's own codes, unless frozen, or forward's serve: one scale, or nothing to multiply them with
        if not frozen and has["grad_output"] and name != "fp8":
            want.add(("weight", asked["weight"], 0))
    if has["input"]:
        want.add(("input", asked["input"], 1))
        if not frozen and has["grad_output"]:
            want.add(("input", asked["input"], 0))
    if has["grad_output"]:
        want |= {("grad_output", asked["grad_output"], 1)} | (
            set() if frozen else {("grad_output", asked["grad_output"], 0)}
        )
    assert set(made) == want
    torch_types = {"int8": torch.int8, "fp8": torch.float8_e4m3fn, "mxfp8": torch.float8_e4m3fn}
    for role in subset:
        kind = torch.float8_e5m2 if name == "fp8" and role == "grad_output" else torch_types[name]
        assert dtypes[role] == {kind}, role
    pairs = [g for g, operands in OF_GEMM.items() if all(has[r] for r in operands) and not (frozen and g == "wgrad")]
    assert len(calls) == (len(pairs) if name == "int8" else 0)
    exact = {"y": (y.detach(), x.detach() @ dense.t()), "dx": (x.grad, dy @ dense)}
    if not frozen:
        exact["dw"] = (box[0].weight.grad, dy.t() @ x.detach())
    touched = {"y": ("input", "weight"), "dx": ("grad_output", "weight"), "dw": ("grad_output", "input")}
    for key, (got, reference) in exact.items():
        error = ((got - reference).norm() / reference.norm()).item()
        low = any(has[role] for role in touched[key])
        assert (1e-4 < error < 0.08) if low else error < 1e-6, (key, error)


def test_roles_that_nothing_acts_on_are_refused_by_name() -> None:
    spec = parse_spec("int8:block128")
    for role in ("optimizer_state", "grad_comm", "weight_comm"):
        with pytest.raises(QuantError, match=role):
            quantize(nn.Sequential(nn.Linear(8, 8)), Policy((Rule("*", role, "*", spec),)))
    with pytest.raises(QuantError, match="saved_input"):
        quantize(nn.Sequential(nn.Linear(8, 8)), {"recipe": "int8", "saved_input": "int8:row"}, frozen=True)
