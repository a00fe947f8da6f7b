"""Mistakes that others shipped, each a test: numbers 1 to 8 and 13 to 20 are about formats and layers, the rest about
whole models (test_mistakes_models.py).  "Breaks when" says what must be broken for the test to fail; five of these
breaks are made on a copy of the source and shown to fail by `make mutations`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lumen.bench.numerics.equality import hard
from lumen.core import LumenError, QuantError
from lumen.formats import FORMATS, Noise, QuantSpec, decode, encode
from lumen.hardware.architectures import ARCHITECTURES, fp8_dialect
from lumen.quant import QuantLinear, dequantize, quantize, recipes
from lumen.quant import gemm as products
from lumen.quant.policy import PolicyBuilder

READY = [name for name, why in recipes.available().items() if not why and name != "bf16"]
BOTH = ["int8", "fp8", "fp8-rowwise", "fp8-blockwise", "mxfp8"]
"""Recipes whose three GEMMs have both operands in low precision and round to nearest."""


def layer_of(recipe: Any, k: int = 64, n: int = 32, *, frozen: bool = False, seed: int = 0) -> QuantLinear:
    torch.manual_seed(seed)
    box = nn.Sequential(nn.Linear(k, n, bias=False).requires_grad_(not frozen))
    quantize(box, recipe)
    layer = box[0]
    assert isinstance(layer, QuantLinear)
    return layer


def run(layer: nn.Module, x: torch.Tensor, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """y, dx, dW."""
    x = x.clone().requires_grad_(True)
    layer.zero_grad()
    y = layer(x)
    y.backward(dy)
    assert x.grad is not None
    weight = layer._parameters["weight"]
    return y.detach(), x.grad, None if weight is None else weight.grad


@contextmanager
def encoded(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[QuantSpec, torch.Tensor]]]:
    """What the layers encode: (spec, codes), in order."""
    made: list[tuple[QuantSpec, torch.Tensor]] = []
    original = products.encode

    def spy(x: torch.Tensor, spec: QuantSpec, **kwargs: Any) -> Any:
        out = original(x, spec, **kwargs)
        made.append((spec, out[0]))
        return out

    with monkeypatch.context() as patch:
        patch.setattr(products, "encode", spy)
        yield made


@pytest.mark.parametrize("recipe", READY)
def test_mistake_01_a_zero_group_is_zero_and_not_nan(recipe: str) -> None:
    """Breaks when a group of zeros gets scale 0 (0 / 0) or its reciprocal infinity."""
    layer = layer_of(recipe)
    weight = layer._parameters["weight"]
    assert weight is not None
    with torch.no_grad():
        weight[3] = 0
    x, dy = torch.randn(6, 64), torch.randn(6, 32)
    x[2] = 0
    dy[4] = 0
    y, dx, dw = run(layer, x, dy)
    assert dw is not None and all(t.isfinite().all() for t in (y, dx, dw))
    assert (y[2] == 0).all() and (y[:, 3] == 0).all() and (dx[4] == 0).all()
    zeros = torch.zeros(6, 64)
    for text in FORMATS:
        spec = QuantSpec.parse(text)
        assert (decode(*encode(zeros, spec), spec, zeros.shape) == 0).all(), text


@pytest.mark.parametrize("text", ["e4m3:128x128", "e4m3:1x128", "e4m3:row", "e4m3:tensor", "int8:row", "int8:128x128"])
def test_mistake_02_a_single_scale_is_read_like_many(text: str) -> None:
    """Breaks when a decoder guesses the kind of scale, or whether to divide by it, from `scale.numel() == 1`."""
    spec = QuantSpec.parse(text)
    for shape in ((1, 128), (128, 128), (256, 128), (1, 256)):
        x = 1000 * torch.randn(shape)
        codes, scales = encode(x, spec)
        back = decode(codes, scales, spec, x.shape)
        assert (back - x).abs().max() < 0.07 * x.abs().max(), shape  # an inverted scale is off by orders
        if scales["scale"].numel() == 1:
            assert torch.equal(back, codes.float() * scales["scale"].float().reshape(1, 1))
    single = encode(torch.randn(128, 128), spec)[1]["scale"]
    assert single.numel() == (1 if str(spec.granularity) in ("tensor", "128x128") else 128)


@pytest.mark.parametrize("recipe", BOTH)
def test_mistake_03_each_operand_has_its_own_scale(recipe: str) -> None:
    """Breaks when a GEMM scales by one operand's scale twice: sizes of 1e3, 1e-2 and 1e-4 would not come out."""
    layer = layer_of(recipe)
    weight = layer._parameters["weight"]
    assert weight is not None
    with torch.no_grad():
        weight.mul_(1e-2)
    x, dy = 1e3 * torch.randn(48, 64), 1e-4 * torch.randn(48, 32)
    w = weight.detach().double()
    exact = (x.double() @ w.t(), dy.double() @ w, dy.double().t() @ x.double())
    for got, want in zip(run(layer, x, dy), exact, strict=True):
        assert got is not None and (got - want).norm() < 0.1 * want.norm()


def test_mistake_04_the_dialect_follows_the_architectures_name() -> None:
    """Breaks when FNUZ is chosen by a capability number (9.x is gfx942 and Hopper alike; gfx1100 says 11.0)."""
    assert {name for name in ARCHITECTURES if fp8_dialect(name) == "fnuz"} == {"gfx942"}
    for name in ("sm_89", "sm_90", "sm_100", "gfx950", "gfx1100", "gfx1200", "gfx1201", "cpu", "no such chip"):
        assert fp8_dialect(name) == "ocp", name
    assert fp8_dialect("gfx942:sramecc+:xnack-") == "fnuz"


@pytest.mark.parametrize(
    "text",
    ["mxfp8_e4m3:row", "mxfp4:block16", "nf4:row", "nf4+sr", "e4m3+dq", "int8+fnuz", "ternary+hadamard16", "q8_0+sr",
     "int8:row+delayed", "e4m3:1x128+delayed", "mxfp4:absmax", "int4:group24+hadamard16", "codebook+sr"],
)  # fmt: skip
def test_mistake_05_an_unsupported_pair_raises(text: str) -> None:
    """Breaks when a pair of format and scaling that does not exist runs as something near it."""
    with pytest.raises(QuantError) as error:
        quantize(nn.Sequential(nn.Linear(64, 32)), {"weight": text, "input": "none", "grad_output": "none"})
    assert error.value.fix


def _variants() -> Iterator[tuple[str, str]]:
    """(default, the same with one option) for every option of every format."""
    shapes = {"tensor": "tensor", "row": "row", "block": "block32", "group": "group32", "tile": "4x32"}
    for name, form in FORMATS.items():
        parts = [shapes[kind] for kind in form.granularities if not form.granularity.startswith(kind)]
        if form.granularity in ("block64", "block128", "block256"):
            parts.append("block32")
        parts += list(form.rules[1:])
        suffixes = [t for t in form.transforms if t.startswith("hadamard")]
        suffixes += ["dq"] if form.double_quant else []
        suffixes += ["sr"] if form.stochastic else []
        suffixes += ["fnuz"] if name in ("e4m3", "e5m2") else []
        yield from ((name, f"{name}:{part}") for part in parts)
        yield from ((name, f"{name}+{suffix}") for suffix in suffixes)


@pytest.mark.parametrize(("plain", "text"), _variants())
def test_mistake_06_every_option_acts(plain: str, text: str) -> None:
    """Breaks when an option of a spec parses and is then ignored: the values after a round trip would be the same."""
    x = hard()[9:41, :256].clone()
    for step, power in ((3, -14), (5, -16), (7, -31)):  # far below the largest: subnormal numbers of every grid
        x[:, ::step] *= 2.0**power
    values = []
    for spec in (QuantSpec.parse(plain), QuantSpec.parse(text)):
        noise = Noise("x") if spec.rounding == "stochastic" else None
        values.append(decode(*encode(x, spec, noise=noise), spec, x.shape))
    assert not torch.equal(*values)


def test_mistake_06_what_has_no_use_raises() -> None:
    """Breaks when an argument that a format cannot use is swallowed."""
    x = torch.randn(4, 64)
    unused: list[tuple[str, dict[str, Any]]] = [
        ("int8", {"noise": Noise()}),
        ("int8", {"importance": x.abs()}),
        ("nf4", {"scale_dtype": torch.bfloat16}),
        ("mxfp4", {"scale_dtype": torch.float16}),
        ("int8", {"nonfinite": "ignore"}),
    ]
    for text, option in unused:
        with pytest.raises(QuantError):
            encode(x, QuantSpec.parse(text), **option)
    for section in (
        {"weights": "int8:row"},
        {"recipe": "int8", "margin": 1},
        {"rules": [{"match": "*", "weigth": "int8"}]},
    ):
        with pytest.raises(LumenError):
            quantize(nn.Sequential(nn.Linear(64, 32)), section)


def _steps() -> dict[str, Any]:
    from lumen.optim import AdamW

    return {
        "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1),
        "foreach": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
        "fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
        "SGD": lambda p: torch.optim.SGD(p, lr=1.0),
        "lumen": lambda p: AdamW([{"named_params": [("weight", w) for w in p]}], lr=0.1),
    }


@pytest.mark.parametrize("name", ["AdamW", "foreach", "fused", "SGD", "lumen", "data", "load"])
@pytest.mark.parametrize("recipe", ["int8", "fp8", "mxfp8"])
def test_mistake_07_codes_follow_the_optimizer(recipe: str, name: str) -> None:
    """Breaks when the quantised weight is cached and not made anew after optimizer.step() or load_state_dict."""
    layer = layer_of(recipe)
    x, dy = torch.randn(8, 64), torch.randn(8, 32)
    run(layer, x, dy)
    weight = layer._parameters["weight"]
    assert weight is not None
    if name == "load":
        layer.load_state_dict({"weight": torch.randn(32, 64)})
    elif name == "data":  # an optimizer that writes to .data leaves no trace in the version counter

        class Plain(torch.optim.SGD):
            def step(self, closure: Any = None) -> None:
                for p in self.param_groups[0]["params"]:
                    p.data = p.data - p.grad

        Plain(layer.parameters(), lr=1.0).step()
    else:
        _steps()[name]([weight]).step()
    fresh = layer_of(recipe, seed=1)
    fresh.load_state_dict(layer.state_dict())
    for got, want in zip(run(layer, x, dy), run(fresh, x, dy), strict=True):
        assert torch.equal(got, want)  # type: ignore[arg-type]


def test_mistake_08_no_cache_is_keyed_by_address() -> None:
    """Breaks when codes are found again by data_ptr: another parameter may lie where a freed one lay."""
    layer = layer_of("int8")
    x = torch.randn(8, 64)
    first = layer(x).detach()
    memory = layer._parameters["weight"].data  # type: ignore[union-attr]
    memory.copy_(torch.randn(32, 64))
    layer._parameters["weight"] = nn.Parameter(memory)
    assert layer._parameters["weight"].data_ptr() == memory.data_ptr()
    fresh = layer_of("int8", seed=1)
    fresh.load_state_dict(layer.state_dict())
    second = layer(x).detach()
    assert torch.equal(second, fresh(x)) and not torch.equal(first, second)


@pytest.mark.parametrize("recipe", ["int8", "fp8", "nf4", "mxfp8"])
def test_mistake_13_frozen_weights_get_no_wgrad_whatever_requires_grad_says(
    recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Breaks when wgrad of a frozen weight is computed, or when it is skipped only because of a flag read at run time:
    under checkpointing the first forward runs without gradients, and a trained weight must still get its own."""
    calls: list[int] = []
    original = products.wgrad_gemm
    monkeypatch.setattr(products, "wgrad_gemm", lambda *a, **k: calls.append(1) or original(*a, **k))
    x, dy = torch.randn(8, 64), torch.randn(8, 32)
    frozen = layer_of(recipe, frozen=True)
    run(frozen, x, dy)
    assert not calls and all(p.grad is None for p in frozen.parameters())
    trained = layer_of(recipe)
    *_, want = run(trained, x, dy)
    for reentrant in (False, True):
        trained.zero_grad()
        checkpoint(trained, x.clone().requires_grad_(True), use_reentrant=reentrant).backward(dy)
        assert torch.equal(trained._parameters["weight"].grad, want)  # type: ignore[union-attr, arg-type]
    assert len(calls) == 3


@pytest.mark.parametrize("recipe", READY)
def test_mistake_14_autograd_keeps_codes_and_no_dense_copy(recipe: str) -> None:
    """Breaks when the dequantised weight is saved for backward: what autograd saves is counted."""
    if recipe == "int8-backward":
        pytest.skip("its forward is in high precision: there are no codes to keep")
    layer = layer_of(recipe, 128, 96, frozen=True)
    kept: list[torch.Tensor] = []
    x = torch.randn(4, 128, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = layer(x)
    wide = [t for t in kept if t.numel() >= 96 * 128 and t.dtype.itemsize > 1]
    assert not wide and kept
    y.backward(torch.randn_like(y))
    stored = sum(t.nbytes for t in layer.state_dict().values())
    assert sum(t.nbytes for t in kept) <= stored + 64


def test_mistake_16_dequantize_leaves_nothing_behind() -> None:
    """Breaks when disabling leaves buffers, hooks, attributes or classes: everything is as before, for every recipe."""

    def anatomy(model: nn.Module) -> Any:
        return [
            (name, type(m), sorted(m.__dict__), list(m._parameters), list(m._buffers), len(m._forward_hooks),
             len(m._forward_pre_hooks), len(m._backward_hooks), "forward" in m.__dict__)
            for name, m in model.named_modules()
        ]  # fmt: skip

    for recipe in READY:
        for frozen in (True, False):
            model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 64, bias=False)).requires_grad_(
                not frozen
            )
            before, state = anatomy(model), copy.deepcopy(model.state_dict())
            quantize(model, recipe)
            x = torch.randn(4, 64, requires_grad=True)
            model(x).sum().backward()
            dequantize(model)
            assert anatomy(model) == before, recipe
            assert list(model.state_dict()) == list(state)
            if not frozen:
                assert all(torch.equal(model.state_dict()[key], value) for key, value in state.items())


def test_mistake_17_enabling_twice_raises_and_changes_nothing() -> None:
    """Breaks when a second quantize() quantises codes, or stacks a second set of hooks."""
    model = nn.Sequential(nn.Linear(64, 32))
    quantize(model, "int8")
    before = model[0]
    for recipe in ("int8", "mxfp8", "nf4"):
        with pytest.raises(QuantError, match="quantised already"):
            quantize(model, recipe)
    assert model[0] is before and before.plan.forward.left.element == "int8"


def test_mistake_18_hybrid_fp8_is_e5m2_in_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """Breaks when gradients run in E4M3 after all: the codes that were made are looked at, not the configuration."""
    layer = layer_of("fp8")
    x = torch.randn(8, 64, requires_grad=True)
    with encoded(monkeypatch) as made:
        y = layer(x)
        forward = len(made)
        y.backward(torch.randn(8, 32))
    assert {codes.dtype for _, codes in made[:forward]} == {torch.float8_e4m3fn}
    backward = [codes.dtype for _, codes in made[forward:]]
    assert backward.count(torch.float8_e5m2) == 2  # dY for dgrad and for wgrad
    assert {spec.element for spec, _ in made[forward:]} == {"e5m2", "e4m3"}


def test_mistake_19_communication_that_is_not_quantised_is_refused() -> None:
    """Breaks when a policy that asks for FP8 communication is accepted while BF16 crosses: until collectives are
    quantised here, it must raise and name the role."""
    for role in ("grad_comm", "weight_comm"):
        with pytest.raises(LumenError, match=role):
            quantize(nn.Sequential(nn.Linear(64, 32)), {"recipe": "fp8", role: "e4m3"})
        policy = PolicyBuilder().add({"weight": "e4m3", "input": "e4m3", role: "e4m3"}).build("mine")
        with pytest.raises(LumenError, match=role):
            quantize(nn.Sequential(nn.Linear(64, 32)), policy)


@pytest.mark.parametrize("recipe", BOTH)
@pytest.mark.parametrize("size", [2e-7, 1e-5, 1.0, 1e4])
def test_mistake_20_fp16_gradients_do_not_overflow_their_scale(recipe: str, size: float) -> None:
    """Breaks when a scale is computed in fp16: 57344 / 2e-7 and 1 / 2e-7 are infinite there, 2e-7 / 127 is zero."""
    torch.manual_seed(0)
    box = nn.Sequential(nn.Linear(64, 32, bias=False)).half()
    quantize(box, recipe)
    x = (0.1 * torch.randn(16, 64)).half().requires_grad_(True)  # or dW itself would leave fp16
    dy = (size * torch.randn(16, 32)).half()
    weight = box[0]._parameters["weight"]
    assert weight is not None
    with torch.no_grad():
        weight.mul_(0.3)
    box(x).backward(dy)
    want = dy.double() @ weight.detach().double()
    assert x.grad is not None and x.grad.isfinite().all() and weight.grad is not None and weight.grad.isfinite().all()
    step = 2.0**-24  # fp16's own smallest step
    assert ((x.grad.double() - want).abs() < 0.25 * want.abs().amax() + 2 * step).all()
    assert x.grad.abs().max() > 0
