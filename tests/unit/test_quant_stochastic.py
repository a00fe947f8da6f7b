"""Stochastic rounding of GEMM operands: no bias; the same numbers where they must repeat, others elsewhere."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tests.helpers import tiny_llama
from torch import nn

from lumen.core.random import philox4x32, random_bits, uniform24
from lumen.formats import Noise
from lumen.quant import QuantLinear, gemm, quantize, set_step

SR = {"weight": "mxfp4:rceil+hadamard16+sr", "input": "mxfp4:rceil+hadamard16+sr", "grad_output": "mxfp4:rceil+sr"}
GENERATOR = torch.Generator().manual_seed(0)


def layer(recipe: Any = "mxfp4", frozen: bool = False, shape: tuple[int, int] = (64, 96)) -> QuantLinear:
    torch.manual_seed(0)
    box = nn.Sequential(nn.Linear(*shape, bias=False))
    quantize(box, recipe, frozen=frozen)
    made = box[0]
    assert isinstance(made, QuantLinear)
    return made


def products(module: QuantLinear, x: torch.Tensor, dy: torch.Tensor) -> dict[str, torch.Tensor]:
    x = x.clone().requires_grad_(True)
    module.zero_grad()
    y = module(x)
    y.backward(dy)
    found = {"forward": y.detach(), "dgrad": x.grad}
    master = module._parameters["weight"]
    if master is not None and master.grad is not None:
        found["wgrad"] = master.grad
    return found


def test_philox_known_answers() -> None:
    """Vectors of the authors' own suite (Random123, kat_vectors), as numbers and as tensors."""
    full = 0xFFFFFFFF
    for word, want in (
        (0, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (full, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    ):
        for key in (word, torch.tensor(word)):
            got = philox4x32((key, key), (torch.tensor([word]), word, word, key))
            assert tuple(int(w) for w in got) == want


def test_pieces_are_one_sequence() -> None:
    """A long draw is made in pieces; it must be the sequence that one piece would be."""
    bits = random_bits(70_001, seed=3, name="x", step=2)
    element = torch.arange(17501)
    from lumen.core.random import hash_name

    want = torch.stack(philox4x32((3, hash_name("x")), (element, 2, 0, 0)), 1).reshape(-1)[:70_001]
    assert torch.equal(bits, want)
    u = uniform24(70_001, seed=3, name=torch.tensor(hash_name("x")), step=torch.tensor(2))
    assert torch.equal(u, (want >> 8).float() * 2.0**-24) and uniform24(0, seed=0, name="").shape == (0,)


@pytest.mark.parametrize("frozen", [False, True])
def test_which_operands_are_rounded_how(frozen: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both operands of dgrad and wgrad stochastic, forward's nearest: what ran, not what was asked."""
    made: list[tuple[str, str, bool]] = []
    real = gemm.encode
    module = layer(frozen=frozen)

    def spy(x: torch.Tensor, spec: Any, noise: Noise | None = None, **kwargs: Any) -> Any:
        made.append((spec.rule, spec.transform, noise is not None))
        return real(x, spec, noise=noise, **kwargs)

    monkeypatch.setattr(gemm, "encode", spy)
    products(module, torch.randn(32, 64), torch.randn(32, 96))
    forward, back = ("even", "hadamard16", False), ("rceil", "hadamard16", True)
    assert made == ([forward] if frozen else [forward] * 2) + [back] * (2 if frozen else 4)


@pytest.mark.parametrize("frozen", [False, True])
def test_gradients_have_no_bias_and_nearest_has(frozen: bool) -> None:
    """Slope <got, exact>/<exact, exact> of dgrad and wgrad: 1 where it is stochastic, .98 per operand to nearest."""
    x, dy = torch.randn(256, 256, generator=GENERATOR), torch.randn(256, 256, generator=GENERATOR)
    slopes: dict[str, dict[str, float]] = {}
    for name, recipe in (
        ("sr", "mxfp4"),
        ("nearest", dict.fromkeys(("weight", "input", "grad_output"), "mxfp4:floor")),
    ):
        module = layer(recipe, frozen, (256, 256))
        weight = module.weight.detach().float()
        exact = {"dgrad": dy @ weight, "wgrad": dy.t() @ x}
        got = products(module, x, dy)
        slopes[name] = {k: ((got[k] * exact[k]).sum() / exact[k].square().sum()).item() for k in got if k in exact}
    assert set(slopes["sr"]) == ({"dgrad"} if frozen else {"dgrad", "wgrad"})
    for name, slope in slopes["sr"].items():
        assert slope == pytest.approx(1.0, abs=0.006), name
    assert all(slope < 0.985 for slope in slopes["nearest"].values()), slopes


@pytest.mark.parametrize("frozen", [False, True])
def test_the_mean_over_steps_goes_to_the_exact_gradient(frozen: bool) -> None:
    """Independent errors: sixteen times the steps, a quarter of the error.  Fails if steps share their numbers."""
    module = layer(frozen=frozen)
    x, dy = torch.randn(64, 64, generator=GENERATOR), torch.randn(64, 96, generator=GENERATOR)
    exact = dy @ module.weight.detach().float()
    errors = []
    total = torch.zeros_like(exact)
    for step in range(64):
        set_step(nn.Sequential(module), step // 4, step % 4)
        total += products(module, x, dy)["dgrad"]
        if step + 1 in (4, 64):
            errors.append(((total / (step + 1) - exact).norm() / exact.norm()).item())
    assert errors[1] < errors[0] * 0.32


def test_a_step_repeats_and_other_steps_micro_steps_seeds_and_ranks_do_not() -> None:
    module = layer()
    box = nn.Sequential(module)
    x, dy = torch.randn(32, 64), torch.randn(32, 96)

    def at(step: int, micro: int = 0) -> torch.Tensor:
        set_step(box, step, micro)
        return products(module, x, dy)["dgrad"]

    first = at(3)
    assert torch.equal(first, at(3)) and torch.equal(at(3, 2), at(3, 2))
    assert not torch.equal(first, at(4)) and not torch.equal(first, at(3, 1))
    assert module.clock is not None
    module.clock.seed = 1
    assert not torch.equal(first, at(3))


def test_layers_and_roles_draw_different_numbers() -> None:
    model = tiny_llama()
    quantize(model, "mxfp4")
    keys = torch.cat([m.noise_keys for m in model.modules() if isinstance(m, QuantLinear)])
    assert keys.unique().numel() == keys.numel() == 14 * 4
    clocks = {id(m.clock) for m in model.modules() if isinstance(m, QuantLinear)}
    assert len(clocks) == 1
    twin = copy.deepcopy(model)
    set_step(twin, 9)
    clock = next(m.clock for m in model.modules() if isinstance(m, QuantLinear))
    assert clock is not None and not clock.told
    assert not any("noise" in name for name in model.state_dict())


@pytest.mark.parametrize("told", [True, False])
@pytest.mark.parametrize("frozen", [True, False])
def test_recomputation_draws_the_numbers_of_its_forward(told: bool, frozen: bool) -> None:
    """Untold with two forward passes before one backward: the first one's recomputation must not take the numbers of
    the second."""
    results = []
    for checkpointing in (False, True):
        model = tiny_llama()
        quantize(model, SR, frozen=frozen)
        model.train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        torch.manual_seed(5)
        losses = []
        for micro in range(2):
            if told:
                set_step(model, 7, micro)
            ids = torch.arange(micro, micro + 20)[None] + 3
            losses.append(model(input_ids=ids, labels=ids).loss)
            if told:
                losses.pop().backward()
        if losses:
            sum(losses).backward()
        results.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    for name, grad in results[0].items():
        torch.testing.assert_close(grad, results[1][name], rtol=1e-5, atol=1e-7)


def test_without_a_clock_a_loop_repeats_with_torchs_generator() -> None:
    module = layer()
    x, dy = torch.randn(32, 64), torch.randn(32, 96)
    torch.manual_seed(1)
    first, second = products(module, x, dy)["dgrad"], products(module, x, dy)["dgrad"]
    torch.manual_seed(1)
    assert torch.equal(first, products(module, x, dy)["dgrad"]) and not torch.equal(first, second)
    module.eval()
    state = torch.get_rng_state()
    with torch.no_grad():
        module(x)
    assert torch.equal(state, torch.get_rng_state())  # a resumed run may not evaluate again


def test_stochastic_int8_rows_and_stored_codes() -> None:
    """`+sr` on int8 keeps the integer product; a frozen weight is rounded once and stays."""
    from lumen.kernels import trace

    spec = "int8:row+sr"
    module = layer({"weight": spec, "input": spec, "grad_output": spec}, frozen=False)
    x, dy = torch.randn(32, 64), torch.randn(32, 96)
    with trace() as calls:
        got = products(module, x, dy)
    assert len(calls) == 3
    weight = module.weight.detach()
    for name, exact in (("forward", x @ weight.t()), ("dgrad", dy @ weight), ("wgrad", dy.t() @ x)):
        assert (got[name] - exact).norm() / exact.norm() < 0.02, name
    frozen = layer({"weight": spec}, frozen=True)
    assert torch.equal(frozen.weight, frozen.weight)


@pytest.mark.parametrize("frozen", [True, False])
def test_compiles_to_one_graph_for_all_layers_and_steps(frozen: bool) -> None:
    """Names, steps and seeds are tensors: a graph per layer or per step would cost what compiling gains."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    quantize(model, "mxfp4", frozen=frozen)
    x, dy = torch.randn(32, 32, requires_grad=True), torch.randn(32, 32)

    def grad(step: int) -> torch.Tensor:
        x.grad = None
        set_step(model, step)
        y = x
        for block in model:
            y = block(y)
        y.backward(dy)
        assert x.grad is not None
        return x.grad

    eager = [grad(step) for step in range(2)]
    for block in model:
        block.compile(backend="aot_eager", fullgraph=True)
    counters.clear()
    for step in range(2):
        torch.testing.assert_close(grad(step), eager[step], rtol=1e-5, atol=1e-6)
    assert counters["stats"]["unique_graphs"] == 1
