"""The C++ linear layer with its LoRA branch against plain torch: odd shapes and ranks, int8 gradients, whole models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tests.helpers.tiny import tiny_llama, tiny_model
from torch import Tensor

import lumen
from lumen.adapters.fused import fuse_lora
from lumen.adapters.native import NativeLoraLinear, use_native_lora
from lumen.kernels import int8_matmul, quantize_int8, trace
from lumen.kernels.cpu import library
from lumen.kernels.cpu.linear import lora_linear, pack_codes
from lumen.models import compile as compiling

pytestmark = pytest.mark.skipif(bool(library.missing()), reason=f"no C++ kernels here: {library.missing()}")

SHAPES = [(1, 2, 2, 1), (5, 6, 10, 2), (7, 50, 34, 3), (64, 192, 576, 8), (97, 130, 98, 20), (1030, 96, 66, 8)]
"""Rows, outputs, inputs, rank."""


def close(found: Tensor, wanted: Tensor, tolerance: float = 0.005) -> bool:
    return bool((found.float() - wanted.float()).norm() <= tolerance * wanted.float().norm() + 1e-6)


def make(rows: int, outer: int, inner: int, rank: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    x, weight = random(rows, inner).bfloat16(), (random(outer, inner) / inner**0.5).bfloat16()
    down, up = random(rank, inner) / inner**0.5, random(outer, rank)
    return x.requires_grad_(), weight, down.requires_grad_(), up.requires_grad_(), random(rows, outer).bfloat16()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("int8", [False, True], ids=["bf16", "int8"])
def test_equals_plain_torch(shape: tuple[int, int, int, int], int8: bool) -> None:
    x, weight, down, up, grad = make(*shape)
    codes, scale = quantize_int8(weight, 0)
    with trace() as ran:
        y = lora_linear(x, weight, down, up, 0.5, pack_codes(codes, scale) if int8 else None)
    assert ran == [("lora_linear", "int8" if int8 else "bf16", "cpu")]
    grads = torch.autograd.grad(y, [x, down, up], grad)
    exact = [t.detach().float().requires_grad_() for t in (x, down, up)]
    wanted = exact[0] @ weight.float().t() + 0.5 * (exact[0] @ exact[1].t()) @ exact[2].t()
    references = list(torch.autograd.grad(wanted, exact, grad.float()))
    if int8:  # the base layer's share through the very codes that the reference makes
        through, row_scale = quantize_int8(grad, 1)
        base = int8_matmul(through, codes, row_scale, scale, torch.float32)
        references[0] = base + 0.5 * (grad.float() @ up.detach()) @ down.detach()
    tolerance = 0.02 if shape[0] == 1 else 0.005  # of two values, each rounded twice
    assert close(y, wanted)
    assert grads[1].dtype == grads[2].dtype == torch.float32
    for mine, reference in zip(grads, references, strict=True):
        assert close(mine, reference, tolerance)


def test_int8_gradient_of_zero_and_broken_rows() -> None:
    """A zero row gives zeros; a row with NaN or Inf gives NaN there and nowhere else."""
    x, weight, down, up, grad = make(20, 50, 34, 2)
    grad[3], grad[5, 7], grad[11, 0] = 0, torch.nan, torch.inf
    codes = pack_codes(*quantize_int8(weight, 0))
    (d_x,) = torch.autograd.grad(lora_linear(x, weight, down, up, 0.5, codes), [x], grad)
    assert (d_x[3] == 0).all() and d_x[5].isnan().all() and not d_x[11].isfinite().any()
    assert d_x[[i for i in range(20) if i not in (5, 11)]].isfinite().all()


def lora_model(recipe: str | None = None, **settings: Any) -> Any:
    model = tiny_llama(dtype=torch.bfloat16, seed=3).train()
    model.requires_grad_(False)
    if recipe:
        lumen.quantize(model, recipe, frozen=True)
    config = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", **settings)
    torch.manual_seed(0)
    model = get_peft_model(model, config)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = torch.randn(parameter.shape) * 0.05
    return model


def gradients(model: Any) -> list[Tensor]:
    model.zero_grad()
    ids = torch.arange(2 * 19).view(2, 19) % 300
    torch.manual_seed(1)
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("recipe", [None, "int8-backward"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_model_learns_the_same(recipe: str | None, compiled: bool) -> None:
    model = lora_model(recipe)
    fuse_lora(model)
    expected = gradients(model)
    assert use_native_lora(model) == {"": 14}
    if compiled:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        compiling.compile_layers(model.get_base_model(), "on")
    found = gradients(model)
    if compiled:
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
        assert not torch._dynamo.utils.counters["graph_break"]
    assert len(found) == len(expected) == 28
    for mine, wanted in zip(found, expected, strict=True):
        assert close(mine, wanted, 0.06)


def test_what_it_does_not_take_runs_as_before() -> None:
    """Dropout, fp32, a recipe with an int8 forward, a disabled adapter."""
    dropping = lora_model(lora_dropout=0.5)
    fuse_lora(dropping)
    assert use_native_lora(dropping) == {}
    int8 = lora_model("int8")
    fuse_lora(int8)
    assert use_native_lora(int8) == {"weight in codes": 14}
    wide = get_peft_model(tiny_llama(), LoraConfig(r=4, target_modules="all-linear"))
    fuse_lora(wide)
    assert use_native_lora(wide) == {"not bf16 on a CPU": 14}
    model = lora_model()
    fuse_lora(model)
    use_native_lora(model)
    ids = torch.arange(7)[None]
    with torch.no_grad(), trace() as ran:
        model(input_ids=ids)
        assert len(ran) == 14
        with model.disable_adapter():
            model(input_ids=ids)
        assert len(ran) == 14  # PEFT's own forward
        layers = [m for m in model.modules() if isinstance(m, NativeLoraLinear)]
        seen: list[int] = []
        layers[0].base_layer.register_forward_hook(lambda *_: seen.append(1))
        layers[1].planned = "another plan"
        model(input_ids=ids)
        assert len(ran) == 14 + 12 and seen == [1]


def test_bias_is_added() -> None:
    model = tiny_model("qwen2", dtype=torch.bfloat16).requires_grad_(False)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "k_proj"]))
    ids = torch.arange(9)[None]
    fuse_lora(model)
    expected = model(input_ids=ids).logits
    use_native_lora(model)
    assert any(isinstance(m, NativeLoraLinear) for m in model.modules())
    assert close(model(input_ids=ids).logits, expected, 0.02)
