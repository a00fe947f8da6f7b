"""Every recipe, frozen and trained, through what models are put through: compile, copies, files, moves, recomputation.

One small model of two blocks stands for all; what is asserted is equality with the same model left alone.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils.checkpoint import checkpoint

from lumen.quant import QuantLinear, dequantize, quantize, recipes

READY = [name for name, why in recipes.available().items() if not why and name != "bf16"]
CASES = [pytest.param(name, frozen, id=f"{name}-{'frozen' if frozen else 'trained'}")
         for name in READY for frozen in (True, False)]  # fmt: skip
every = pytest.mark.parametrize(("recipe", "frozen"), CASES)


class Block(nn.Module):
    def __init__(self, how: bool | None = None) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(64)
        self.up = nn.Linear(64, 96)
        self.down = nn.Linear(96, 64, bias=False)
        self.recompute = how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.recompute is None:
            return self.body(x)
        result: torch.Tensor = checkpoint(self.body, x, use_reentrant=self.recompute)
        return result

    def body(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.silu(self.up(self.norm(x))))


def model_of(recipe: str = "", frozen: bool = False, *, seed: int = 0, how: bool | None = None) -> Any:
    torch.manual_seed(seed)
    model = nn.Sequential(Block(how), Block(how))
    if recipe:
        quantize(model, recipe, frozen=frozen)
    return model


def inputs(seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(8, 64, generator=generator), torch.randn(8, 64, generator=generator)


def run(model: nn.Module, *, seed: int = 1) -> dict[str, torch.Tensor]:
    """Output, the input's gradient and every parameter's."""
    x, dy = inputs(seed)
    torch.manual_seed(seed)  # stochastic rounding numbers its draws with torch's generator
    x.requires_grad_()
    model.zero_grad()
    y = model(x)
    y.backward(dy.to(y.dtype))
    assert x.grad is not None
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"y": y.detach().clone(), "dx": x.grad.clone(), **grads}


def assert_same(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor], **bounds: float) -> None:
    assert got.keys() == want.keys()
    for name, tensor in got.items():
        if bounds:
            torch.testing.assert_close(tensor, want[name], **bounds)
        else:
            assert torch.equal(tensor, want[name]), name


@pytest.mark.parametrize(("recipe", "frozen"), [("int8", False), ("fp8", True), ("nf4", True)])
def test_compiles_to_one_graph(recipe: str, frozen: bool) -> None:
    """Training, evaluation and an input without gradient: each one graph without a break, with eager's numbers."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    model = model_of(recipe, frozen)
    want = run(model)
    counters.clear()
    compiled = torch.compile(model, backend="aot_eager")
    close = {"rtol": 1e-4, "atol": 1e-4}
    assert_same(run(compiled), {f"_orig_mod.{k}" if "." in k else k: v for k, v in want.items()}, **close)
    assert not counters["graph_break"] and counters["stats"]["unique_graphs"] == 1
    model.eval()
    with torch.no_grad():
        x, _ = inputs()
        torch.testing.assert_close(compiled(x), model(x), **close)
    assert not counters["graph_break"] and counters["stats"]["unique_graphs"] == 2
    y = compiled(x)  # gradients on, but none is asked for the input
    torch.testing.assert_close(y, model(x), **close)
    assert not counters["graph_break"] and counters["stats"]["unique_graphs"] <= 3


@every
def test_deepcopy_is_whole_and_apart(recipe: str, frozen: bool) -> None:
    model = model_of(recipe, frozen)
    run(model)  # caches are filled
    twin = copy.deepcopy(model)
    assert_same(run(twin), run(model))
    before = run(model)["y"]
    with torch.no_grad():
        for tensor in (*twin.parameters(), *twin.buffers()):
            tensor.zero_()
    assert torch.equal(run(model)["y"], before)
    ours = {t.data_ptr() for t in (*model.parameters(), *model.buffers())}
    assert not ours & {t.data_ptr() for t in (*twin.parameters(), *twin.buffers()) if t.numel()}


@every
def test_a_safetensors_file_carries_it(recipe: str, frozen: bool, tmp_path: Path) -> None:
    """Plain tensors only; into a model of another seed, and over one that has run already (its codes must not stay)."""
    model = model_of(recipe, frozen)
    want = run(model)
    save_file({k: v.contiguous() for k, v in model.state_dict().items()}, tmp_path / "m.safetensors")
    other = model_of(recipe, frozen, seed=5)
    assert not torch.equal(run(other)["y"], want["y"])
    missing = other.load_state_dict(load_file(tmp_path / "m.safetensors"))
    assert not missing.missing_keys and not missing.unexpected_keys
    assert_same(run(other), want)


@every
def test_dtypes_change_what_is_computed_and_nothing_stored(recipe: str, frozen: bool) -> None:
    model = model_of(recipe, frozen)
    run(model)  # smoothing is calibrated on the first batch
    layers = [m for m in model.modules() if isinstance(m, QuantLinear)]
    stored = [[t.clone() for t in (*m.parameters(), *m.buffers())] for m in layers if m.plan.stores_codes]
    biases = {id(m.bias) for m in layers if m.bias is not None}
    model.eval()  # nothing is pushed into histories of scales
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        model.to(dtype)
        assert {m.weight.dtype for m in layers} == {dtype}
        x, _ = inputs()
        assert model(x.to(dtype)).dtype == dtype
    assert biases == {id(m.bias) for m in layers if m.bias is not None}
    now = [[*m.parameters(), *m.buffers()] for m in layers if m.plan.stores_codes]
    for before, after in zip(stored, now, strict=True):
        for old, new in zip(before, after, strict=True):
            if old.shape != (96,):  # a bias went to bf16 and back
                assert old.dtype == new.dtype and torch.equal(old, new)


@every
def test_meta_and_back(recipe: str, frozen: bool) -> None:
    """`.to("meta")` keeps shapes, dtypes and keys; `to_empty` and a state dict bring the model back."""
    if recipe == "int8-smooth":
        pytest.skip("a calibrated layer refuses factors for other groups, and memory of to_empty is arbitrary")
    model = model_of(recipe, frozen)
    want, state = run(model), {k: v.clone() for k, v in model.state_dict().items()}
    model.to("meta")
    assert all(t.is_meta for t in (*model.parameters(), *model.buffers()))
    assert model.state_dict().keys() == state.keys()
    assert [v.dtype for v in model.state_dict().values()] == [v.dtype for v in state.values()]
    model.to_empty(device="cpu")
    model.load_state_dict(state)
    assert_same(run(model), want)


@every
@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputation_changes_nothing(recipe: str, frozen: bool, reentrant: bool) -> None:
    """Two steps, so that what a recomputation might push into a history or draw from a counter would show."""
    plain, recomputed = model_of(recipe, frozen), model_of(recipe, frozen, how=reentrant)
    for seed in (1, 2):
        assert_same(run(recomputed, seed=seed), run(plain, seed=seed))
        for model in (plain, recomputed):
            with torch.no_grad():
                for p in model.parameters():
                    if p.grad is not None:
                        p -= 0.01 * p.grad


@every
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dequantize_gives_everything_back(recipe: str, frozen: bool, dtype: torch.dtype) -> None:
    """Modules, keys, hooks, ties, flags, dtypes and buffers are those of before; frozen values those of the codes."""
    model = model_of().to(dtype)
    model[1].up = model[0].up  # one module in two places
    if recipe != "int8-smooth":  # whose factors are measured layer by layer, on each one's own input
        model[1].down.weight = model[0].down.weight  # and one weight in two modules
    model[0].norm.register_buffer("extra", torch.arange(3))
    model[0].up.bias.requires_grad_(False)
    model[0].up.eval()
    seen: list[str] = []
    model[0].up.register_forward_hook(lambda *_: seen.append("forward"))
    model[0].down.register_full_backward_hook(lambda *_: seen.append("backward"))

    def facts() -> Any:
        tensors = (*model.named_parameters(remove_duplicate=False), *model.named_buffers())
        return (
            [(n, type(m), m.training) for n, m in model.named_modules(remove_duplicate=False)],
            [(n, t.shape, t.dtype, t.requires_grad, t.device) for n, t in tensors],
            list(model.state_dict()),
            model[0].up is model[1].up,
            model[0].down.weight is model[1].down.weight,
            [len(m._forward_hooks) + len(m._backward_hooks) for m in model.modules()],
        )

    before, values = facts(), {k: v.clone() for k, v in model.state_dict().items()}
    quantize(model, recipe, frozen=frozen)
    run(model.to(dtype)) if dtype == torch.float32 else None
    inside = {
        n: m.weight.detach().clone()
        for n, m in model.named_modules(remove_duplicate=False)
        if isinstance(m, QuantLinear)
    }
    seen.clear()
    dequantize(model)
    assert facts() == before
    for name, value in model.state_dict().items():
        layer = name.removesuffix(".weight")
        assert torch.equal(value, inside[layer] if layer in inside else values[name]), name
        if not frozen:
            assert torch.equal(value, values[name]), name
    assert all("lumen" not in type(m).__module__ for m in model.modules())
    model(torch.randn(2, 64, dtype=dtype)).sum().backward()
    assert seen.count("forward") == 2 and seen.count("backward") == 1
