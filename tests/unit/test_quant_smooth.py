"""SmoothQuant: what it computes, how it is calibrated, groups chosen by measured error, saving and loading."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tests.helpers import tiny_llama
from torch import nn

from lumen.core import QuantError
from lumen.kernels import select, trace
from lumen.quant import QuantLinear, dequantize, quantize
from lumen.quant.report import layer_report
from lumen.quant.smooth import factors, restore, smoothings

K, N = 384, 64


def inputs(singles: float = 0.0) -> torch.Tensor:
    """[96, 384] with two outlier channels, and on wish a share of single outliers all over."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(96, K, generator=generator)
    x[:, 5] *= 60
    x[:, 99] *= 30
    if singles:
        x *= 1 + (torch.rand(96, K, generator=generator) < singles) * 80
    return x


def pair(recipe: Any, frozen: bool, **kwargs: Any) -> tuple[QuantLinear, torch.Tensor]:
    torch.manual_seed(0)
    box = nn.Sequential(nn.Linear(K, N, bias=False))
    weight = box[0].weight.detach().clone()
    quantize(box, recipe, frozen=frozen, **kwargs)
    assert isinstance(box[0], QuantLinear)
    return box[0], weight


def db(got: torch.Tensor, want: torch.Tensor) -> float:
    return (10 * torch.log10(want.square().sum() / (got - want).square().sum())).item()


def row(x: torch.Tensor, dim: int) -> torch.Tensor:
    scale = x.abs().amax(dim, keepdim=True) / 127
    return (x / scale).round() * scale


@pytest.mark.parametrize("frozen", [True, False])
def test_equals_the_definition_in_all_three_products(frozen: bool) -> None:
    """An independent fake-quantised layer; fails if s is inverted, applied twice or left out of dgrad."""
    layer, weight = pair({"recipe": "int8-smooth", "smooth": {"target_db": 0}}, frozen)
    x, dy = inputs().requires_grad_(True), torch.randn(96, N)
    y = layer(x)
    y.backward(dy)
    xd = x.detach()
    s = xd.abs().amax(0) ** 0.7 / weight.abs().amax(0) ** 0.3
    torch.testing.assert_close(layer.smooth, s, rtol=1e-5, atol=1e-7)
    folded = row(weight * s, 1)
    torch.testing.assert_close(y.detach(), row(xd / s, 1) @ folded.t(), rtol=1e-4, atol=1e-4)
    if frozen:
        scale = (weight * s).abs().amax(1, keepdim=True) / 127
        want = row(dy * scale.t(), 1) @ (weight * s / scale).round() / s
        torch.testing.assert_close(layer.weight + 0, folded / s, rtol=1e-4, atol=1e-6)
    else:
        want = row(dy, 1) @ row(weight, 0)
        torch.testing.assert_close(layer.weight.grad, row(dy, 0).t() @ row(xd, 0), rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(x.grad, want, rtol=1e-4, atol=1e-4)


def test_it_helps_where_channels_have_outliers() -> None:
    x = inputs()
    found = {}
    for recipe in ("int8", "int8-smooth"):
        layer, weight = pair(recipe, False)
        found[recipe] = db(layer(x).detach(), x @ weight.t())
    assert found["int8-smooth"] > found["int8"] + 3


@pytest.mark.parametrize("frozen", [True, False])
def test_groups_are_chosen_by_measured_error_and_run_on_the_integer_product(frozen: bool) -> None:
    plain, weight = pair("int8-smooth", frozen)
    plain(inputs())
    assert int(plain.smooth_group) == 0  # smoothing was enough
    x = inputs(singles=0.002)
    base, _ = pair({"recipe": "int8-smooth", "smooth": {"target_db": 0}}, frozen)
    layer, _ = pair({"recipe": "int8-smooth", "smooth": {"target_db": 36}}, frozen)
    exact = x @ weight.t()
    with trace() as calls:
        y = layer(x.clone().requires_grad_(True))
        forward = len(calls)
        y.backward(torch.randn(96, N))
    group = int(layer.smooth_group)
    assert group and K % group == 0 and forward == K // group
    told = {g.gemm: (g.left, g.kind) for g in layer_report("layer", layer, "cpu").gemms}
    assert told["forward"] == (f"int8:group{group}:absmax", select("int8_matmul", "cpu", "int8").kind)
    assert told["dgrad"][1] == told["forward"][1]
    assert len(calls) - forward == (K // group if frozen else 2)
    assert db(y.detach(), exact) > db(base(x).detach(), exact) + 1.5
    want = layer.weight.detach().float() if frozen else weight
    x2 = x.clone().requires_grad_(True)
    dy = torch.randn(96, N)
    layer(x2).backward(dy)
    assert x2.grad is not None and db(x2.grad, dy @ want) > 30


def test_calibration_on_batches_then_fixed_and_as_a_checkpoint_says() -> None:
    ids = [torch.arange(3, 19)[None] + 7 * i for i in range(3)]
    model = tiny_llama()
    report = quantize(model, "int8-smooth", frozen=True, calibration=[{"input_ids": i} for i in ids])
    assert all("group" in g.left or "row" in g.left for x in report.layers for g in x.gemms)
    q_proj = model.model.layers[0].self_attn.q_proj
    want = torch.zeros(32)
    dense = tiny_llama()

    def look(module: nn.Module, args: Any) -> None:
        want.copy_(torch.maximum(want, args[0].detach().abs().amax((0, 1))))

    dense.model.layers[0].self_attn.q_proj.register_forward_pre_hook(look)
    for one in ids:
        dense(input_ids=one)
    dense_weight = dense.model.layers[0].self_attn.q_proj.weight
    torch.testing.assert_close(q_proj.smooth, factors(want, dense_weight, 0.7), rtol=1e-4, atol=1e-6)
    before = {k: v.clone() for k, v in smoothings(model).items()}
    model.train()
    model(input_ids=ids[0] + 100)
    assert len(before) == 28 and all(torch.equal(v, before[k]) for k, v in smoothings(model).items())
    other = tiny_llama()
    quantize(other, "int8-smooth", frozen=True)
    restore(other, before)
    assert torch.equal(other(input_ids=ids[0]).logits, model(input_ids=ids[0]).logits)


@pytest.mark.parametrize("frozen", [True, False])
def test_state_dicts_and_dequantize(frozen: bool) -> None:
    """Into a model that has not been calibrated: with the file's factors.  A dense weight is folded when it loads."""
    layer, weight = pair("int8-smooth", frozen)
    x = inputs()
    y = layer(x)
    fresh, _ = pair("int8-smooth", frozen)
    fresh.load_state_dict(layer.state_dict())
    assert torch.equal(fresh(x), y) and torch.equal(copy.deepcopy(layer)(x), y)
    layer.load_state_dict({"weight": weight * 2})
    torch.testing.assert_close(layer(x), y * 2, rtol=1e-3, atol=1e-3)
    box = nn.Sequential(fresh)
    value = fresh.weight.detach().clone()
    dequantize(box)
    assert torch.equal(box[0].weight.detach(), value) and list(box.state_dict()) == ["0.weight"]
    waiting, weight = pair("int8-smooth", frozen)
    box = nn.Sequential(waiting)
    dequantize(box)
    assert torch.equal(box[0].weight.detach(), weight)


def test_compiles_once_calibrated() -> None:
    torch._dynamo.reset()
    box = nn.Sequential(nn.Linear(64, 32, bias=False))
    quantize(box, "int8-smooth", frozen=True)
    x = torch.randn(8, 64)
    eager = box(x)
    compiled = torch.compile(box, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x.requires_grad_(True)), eager, rtol=1e-5, atol=1e-5)


def test_mistakes_are_said() -> None:
    for bad, said in (
        ({"grad_output": "int8:row+smooth"}, "smooths nothing"),
        ({"recipe": "int8-smooth", "smooth": {"alpha": 2}}, "alpha"),
        ({"recipe": "int8", "smooth": {"alpha": 0.5}}, "would do nothing"),
    ):
        with pytest.raises(QuantError, match=said):
            pair(bad, False)
    with pytest.raises(QuantError, match="nothing to calibrate"):
        pair("int8", True, calibration=[])
    with pytest.raises(QuantError, match="saw no input"):
        pair("int8-smooth", True, calibration=[])
