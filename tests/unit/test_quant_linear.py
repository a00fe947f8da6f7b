"""QuantLinear against a fake-quantised layer written here from the definition, in fp64."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from lumen.core import QuantError
from lumen.kernels import trace
from lumen.quant import QuantLinear, dequantize, quantize

SHAPES = [((16, 64), 32), ((1, 33), 7), ((3, 5, 24), 40), ((0, 16), 8), ((600, 17), 9), ((2, 1), 3)]


def fake_quant(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Round trip through symmetric int8 with one scale per slice along `dim`, from the definition."""
    scale = x.abs().amax(dim, keepdim=True) / 127 if x.shape[dim] else torch.ones(())
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    return torch.round(x / scale).clamp(-127, 127) * scale


def expected(
    recipe: str, frozen: bool, x: torch.Tensor, w: torch.Tensor, dy: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """y, dx, dW of the definition: every operand scaled along the dimension that is not contracted."""
    xf, wf, dyf = x.float(), w.float(), dy.float()
    wq = fake_quant(wf, 1)
    if recipe == "int8-weight-only":
        parts = xf @ wq.t(), dyf @ wq, dyf.t() @ xf
    else:
        y = xf @ wf.t() if recipe == "int8-backward" else fake_quant(xf, 1) @ wq.t()
        if frozen and recipe == "int8":
            scale = wf.abs().amax(1, keepdim=True) / 127
            codes = torch.round(wf / scale)
            dx = fake_quant(dyf * scale.t(), 1) @ codes
        else:
            dx = fake_quant(dyf, 1) @ fake_quant(wf, 0)
        parts = y, dx, fake_quant(dyf, 0).t() @ fake_quant(xf, 0)
    return parts


def run(layer: nn.Module, x: torch.Tensor, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    x = x.clone().requires_grad_(True)
    y = layer(x)
    y.backward(dy)
    return y.detach(), x.grad


def one(linear: nn.Linear, recipe: Any, **kwargs: Any) -> QuantLinear:
    box = nn.Sequential(linear)
    quantize(box, recipe, **kwargs)
    layer = box[0]
    assert isinstance(layer, QuantLinear)
    return layer


@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("recipe", ["int8", "int8-backward", "int8-weight-only"])
@pytest.mark.parametrize(("lead", "out"), SHAPES)
def test_equals_the_definition(recipe: str, frozen: bool, lead: tuple[int, ...], out: int) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(lead[-1], out, bias=False).requires_grad_(not frozen)
    w = linear.weight.detach().clone()
    layer = one(linear, recipe)
    x, dy = torch.randn(lead), torch.randn(*lead[:-1], out)
    y, dx = run(layer, x, dy)
    ey, edx, edw = expected(recipe, frozen, x.flatten(0, -2), w, dy.flatten(0, -2))
    close = {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(y, ey.reshape(y.shape), **close)
    torch.testing.assert_close(dx, edx.reshape(x.shape), **close)
    if frozen:
        assert all(p.grad is None for p in layer.parameters())
    else:
        torch.testing.assert_close(layer.weight.grad, edw, **close)


def test_what_ran_is_what_the_recipe_says() -> None:
    """Counts integer products: an option accepted and ignored would show here."""
    for recipe, frozen, count in [
        ("int8", True, 2), ("int8", False, 3), ("int8-backward", True, 1), ("int8-backward", False, 2),
        ("int8-weight-only", False, 0),
    ]:  # fmt: skip
        layer = one(nn.Linear(16, 16).requires_grad_(not frozen), recipe)
        with trace() as calls:
            run(layer, torch.randn(4, 16), torch.randn(4, 16))
        assert [c[:2] for c in calls] == [("int8_matmul", "int8")] * count, recipe


def test_optimizer_step_refreshes_the_codes() -> None:
    """Fails if the cache is keyed by address, or by nothing: the output must follow the master."""
    layer = one(nn.Linear(8, 8), "int8")
    for make in (torch.optim.AdamW, torch.optim.SGD):
        optimizer = make(layer.parameters(), lr=0.1)
        x = torch.randn(4, 8)
        for _ in range(3):
            run(layer, x, torch.randn(4, 8))
            optimizer.step()
            fresh = one(nn.Linear(8, 8), "int8")
            fresh.load_state_dict(layer.state_dict())
            assert torch.equal(layer(x), fresh(x))


def test_weight_is_quantised_once_per_step(monkeypatch: pytest.MonkeyPatch) -> None:
    from lumen.quant import gemm

    made = []
    original = gemm.weight_codes
    monkeypatch.setattr(gemm, "weight_codes", lambda *a: made.append(1) or original(*a))
    layer = one(nn.Linear(8, 8), "int8")
    made.clear()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    for _ in range(2):
        for _ in range(3):  # micro-steps
            run(layer, torch.randn(4, 8), torch.randn(4, 8))
        optimizer.step()
    assert len(made) == 2


def test_frozen_saves_codes_and_no_dense_copy() -> None:
    """Counts what autograd keeps: the stored codes and scales themselves, nothing else of size."""
    layer = one(nn.Linear(64, 64, bias=False).requires_grad_(False), "int8")
    kept: list[torch.Tensor] = []
    x = torch.randn(32, 64, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        layer(x)
    stored = {layer._parameters["weight"].data_ptr(), layer.weight_scale.data_ptr()}
    assert {t.data_ptr() for t in kept} == stored
    assert all(not t.is_floating_point() or t.numel() <= 64 for t in kept)


def test_dtype_changes_keep_codes_and_scales() -> None:
    layer = one(nn.Linear(16, 8).requires_grad_(False), "int8")
    codes, scale = layer._parameters["weight"].clone(), layer.weight_scale.clone()
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        layer.to(dtype)
        assert torch.equal(layer._parameters["weight"], codes) and torch.equal(layer.weight_scale, scale)
        assert layer.weight.dtype == dtype and layer(torch.randn(2, 16, dtype=dtype)).dtype == dtype


def test_writing_into_a_dequantised_copy_raises() -> None:
    layer = one(nn.Linear(8, 8).requires_grad_(False), "int8")
    with pytest.raises(QuantError, match="lost"):
        layer.weight.data += 1
    with pytest.raises(QuantError, match="lost"):
        layer.weight.data = torch.zeros(8, 8)


def test_nan_shows_in_the_result() -> None:
    layer = one(nn.Linear(8, 8).requires_grad_(False), "int8")
    x = torch.randn(3, 8)
    x[1, 2] = float("nan")
    y = layer(x)
    assert y[1].isnan().all() and y[[0, 2]].isfinite().all()


def test_deepcopy_is_independent() -> None:
    layer = one(nn.Linear(8, 8), "int8")
    x = torch.randn(4, 8)
    before = layer(x)
    twin = copy.deepcopy(layer)
    with torch.no_grad():
        twin.weight.mul_(-1)
    assert torch.equal(layer(x), before)
    torch.testing.assert_close(twin(x) - twin.bias, layer.bias - before)


def test_dequantize_gives_back_master_and_values() -> None:
    for frozen in (True, False):
        model = nn.ModuleDict({"a": nn.Linear(8, 8), "b": nn.Sequential(nn.Linear(8, 4, bias=False), nn.ReLU())})
        model.requires_grad_(not frozen)
        keys, kinds = list(model.state_dict()), [(n, type(m)) for n, m in model.named_modules()]
        master = model["a"].weight
        quantize(model, "int8")
        value = model["a"].weight.detach().clone()
        dequantize(model)
        assert list(model.state_dict()) == keys and [(n, type(m)) for n, m in model.named_modules()] == kinds
        assert torch.equal(model["a"].weight, value)
        assert (model["a"].weight is master) == (not frozen)
        assert all("lumen" not in type(m).__module__ for m in model.modules())
        dequantize(model)  # a second time changes nothing


def test_enabling_twice_raises() -> None:
    model = nn.Sequential(nn.Linear(8, 8))
    quantize(model, "int8")
    with pytest.raises(QuantError, match="already"):
        quantize(model, "int8")
