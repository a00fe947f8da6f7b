"""Delayed and static scaling against a simulation written here from NUMERICS, and what must not touch a history."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tests.helpers import tiny_llama
from torch import nn

from lumen.core import QuantError
from lumen.formats import QuantSpec, encode
from lumen.quant import QuantLinear, quantize
from lumen.quant.scaling import calibrating, give_amax, histories, pushed

DELAYED = {"weight": "e4m3:tensor+delayed", "input": "e4m3:tensor+delayed", "grad_output": "e5m2:tensor+delayed"}


def layer(frozen: bool = False, **options: Any) -> tuple[QuantLinear, torch.optim.Optimizer]:
    torch.manual_seed(0)
    box = nn.Sequential(nn.Linear(16, 24, bias=False))
    quantize(box, {**DELAYED, **({"delayed": options} if options else {})}, frozen=frozen)
    made = box[0]
    assert isinstance(made, QuantLinear)
    extra = [nn.Parameter(torch.zeros(1))]
    return made, torch.optim.SGD([*extra, *(p for p in made.parameters() if p.requires_grad)], lr=0.1)


def cast(x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype = torch.float8_e4m3fn) -> torch.Tensor:
    largest = torch.finfo(dtype).max
    return (x / scale).clamp(-largest, largest).to(dtype).float() * scale


def step(module: QuantLinear, optimizer: torch.optim.Optimizer, *inputs: torch.Tensor) -> list[torch.Tensor]:
    ys = []
    for x in inputs:
        y = module(x.clone().requires_grad_(True))
        y.backward(torch.full_like(y, 0.01))
        ys.append(y.detach())
    optimizer.step()
    optimizer.zero_grad()
    return ys


@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
@pytest.mark.parametrize("margin", [0, 1])
def test_scales_follow_the_history_before_the_push(algorithm: str, margin: int) -> None:
    """Six steps of two micro-batches with a history of 3; a zero and an infinite amax leave the scale as it was."""
    module, optimizer = layer(history=3, margin=margin, algorithm=algorithm)
    past: list[float] = []
    for index, size in enumerate([1.0, 4.0, 0.0, 0.5, float("inf"), 0.25, 8.0]):
        torch.manual_seed(index)
        inputs = [torch.randn(8, 16) * size, torch.randn(8, 16) * size / 2]
        if size == float("inf"):
            inputs = [torch.full((8, 16), size)] * 2
        weight = module.weight.detach().clone()
        w_past = module.amax_history[0].clone()
        ys = step(module, optimizer, *inputs)
        with torch.no_grad():
            module.weight.copy_(weight * 0.9)  # not the gradient of an infinite input
        w_used = (w_past.max() if algorithm == "max" else w_past[0]) if w_past[0] > 0 else weight.abs().max()
        for x, y in zip(inputs, ys, strict=True):
            amax = x.abs().max().item()
            used = (max(past[:3]) if algorithm == "max" else past[0]) if past else amax
            scale = torch.tensor(used if used else 448.0) / 448 * 2**margin
            if size == float("inf"):
                assert y.isnan().all()
                continue
            want = cast(x, scale) @ cast(weight, w_used / 448 * 2**margin).t()
            torch.testing.assert_close(y, want, rtol=1e-5, atol=1e-6)
        largest = max(x.abs().max().item() for x in inputs)
        if 0 < largest < float("inf"):
            past.insert(0, largest)
    got = [v for v in module.amax_history[1].tolist() if v]
    assert got == pytest.approx(past[:3])


def test_a_push_is_one_entry_per_step_and_static_keeps_its_first() -> None:
    history = torch.tensor([[5.0, 3.0], [0.0, 0.0], [2.0, 0.0]])
    now = torch.tensor([7.0, float("nan"), 9.0])
    got = pushed(history, now, torch.tensor([False, False, True]))
    assert got.tolist() == [[7.0, 5.0], [0.0, 0.0], [2.0, 0.0]]


def test_evaluation_and_unfinished_steps_push_nothing() -> None:
    module, optimizer = layer()
    step(module, optimizer, torch.randn(4, 16))
    before = {k: v.clone() for k, v in histories(module).items()}
    module.eval()
    with torch.no_grad():
        module(torch.randn(4, 16) * 100)
    module(torch.randn(4, 16) * 100).sum().backward()
    optimizer.zero_grad()
    assert all(torch.equal(v, before[k]) for k, v in histories(module).items())
    module.train()
    step(module, optimizer, torch.randn(4, 16))
    assert module.amax_history[1, 2:].abs().sum() == 0 and module.amax_history[1, 1] > 0


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_uses_the_scale_of_its_forward_and_pushes_nothing(reentrant: bool) -> None:
    """Fails where recomputing pushes: the history, and from the second step on every gradient, would differ."""
    results = []
    for checkpointing in (False, True):
        model = tiny_llama()
        quantize(model, "fp8-delayed")
        model.train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            model.get_input_embeddings().register_forward_hook(lambda module, args, output: output.requires_grad_())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for index in range(3):
            optimizer.zero_grad()
            ids = torch.arange(index, index + 12)[None] + 3
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
        results.append({**histories(model), **{n: p.detach() for n, p in model.named_parameters()}})
    assert any(v.count_nonzero() >= 9 for n, v in results[0].items() if n.endswith("history"))
    for name, value in results[0].items():
        assert torch.equal(value, results[1][name]), name


def test_histories_are_in_the_state_dict_and_dense_ones_load() -> None:
    module, optimizer = layer()
    step(module, optimizer, torch.randn(4, 16))
    twin, other = layer()
    twin.load_state_dict(module.state_dict())
    assert torch.equal(twin.amax_history, module.amax_history)
    x = torch.randn(4, 16)
    for a, b in zip(step(twin, other, x, x), step(module, optimizer, x, x), strict=True):
        assert torch.equal(a, b)
    twin.load_state_dict({"weight": torch.zeros(24, 16)})
    short, _ = layer(history=1)
    short.load_state_dict(module.state_dict())
    assert torch.equal(short.amax_history[:, 0], module.amax_history[:, 0])
    clone = copy.deepcopy(module)
    step(clone, torch.optim.SGD(clone.parameters(), lr=0.1), x)
    assert clone.amax_history[1].count_nonzero() == 3


def test_the_gradients_dtype_is_e5m2_and_its_history_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    from lumen.quant import gemm

    made: list[str] = []
    real = gemm.encode
    monkeypatch.setattr(gemm, "encode", lambda x, spec, **k: made.append(str(spec)) or real(x, spec, **k))
    module, optimizer = layer()
    step(module, optimizer, torch.randn(4, 16))
    kinds = [spec.partition("+")[0] for spec in made]
    assert kinds == ["e4m3", "e4m3", "e5m2", "e5m2", "e4m3"] and all(spec.endswith("delayed") for spec in made)
    assert module.amax_history[:, 0].tolist() == pytest.approx(
        [module.amax_history[0, 0].item(), module.amax_history[1, 0].item(), 0.01]
    )


def test_static_scales_are_calibrated_or_given_and_then_kept() -> None:
    spec = "e4m3:tensor+static"
    box = nn.Sequential(nn.Linear(16, 24, bias=False))
    quantize(box, {"weight": spec, "input": spec, "grad_output": "e5m2:tensor"})
    module = box[0].eval()
    x = torch.randn(8, 16)
    with calibrating(box):
        module(x)
        module(x * 3)
    kept = module.amax_history.clone()
    assert kept[1, 0] == (x * 3).abs().max() and kept[2].count_nonzero() == 0
    module.train()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    step(module, optimizer, x * 10)
    assert torch.equal(module.amax_history[1], kept[1]) and module.amax_history[2].count_nonzero() == 0
    give_amax(box, {"0": {"input": 2.5}})
    assert module.amax_history[1, 0] == 2.5
    for bad in ({"1": {"input": 1.0}}, {"0": {"input": 0.0}}, {"0": {"nothing": 1.0}}):
        with pytest.raises(QuantError):
            give_amax(box, bad)
    with pytest.raises(QuantError, match="no layer"), calibrating(nn.Linear(2, 2)):
        pass


def test_int8_tensor_scales_can_be_delayed_on_the_integer_product() -> None:
    from lumen.kernels import trace

    spec = "int8:tensor+delayed"
    box = nn.Sequential(nn.Linear(16, 24, bias=False))
    quantize(box, {"weight": spec, "input": spec, "grad_output": spec})
    optimizer = torch.optim.SGD(box.parameters(), lr=0.0)
    x = torch.randn(8, 16)
    with trace() as calls:
        step(box[0], optimizer, x)
        (y,) = step(box[0], optimizer, x * 5)
    assert len(calls) == 6
    scale = x.abs().max() / 127
    ws = box[0].weight.detach().abs().max() / 127
    want = (x * 5 / scale).round().clamp(-127, 127) * scale @ ((box[0].weight.detach() / ws).round() * ws).t()
    torch.testing.assert_close(y, want, rtol=1e-5, atol=1e-5)


def test_mistakes_are_said() -> None:
    for bad, said in (
        ({"recipe": "int8", "delayed": {"history": 4}}, "would do nothing"),
        ({"recipe": "fp8-delayed", "delayed": {"history": 0}}, "remembers nothing"),
        ({"weight": "e4m3:row+delayed"}, "per row"),
        ({"recipe": "fp8-delayed", "delayed": {"algorithm": "mean"}}, "algorithm"),
    ):
        with pytest.raises(QuantError, match=said):
            quantize(nn.Sequential(nn.Linear(16, 16)), bad)
    with pytest.raises(QuantError, match="needs a scale"):
        encode(torch.randn(4, 4), QuantSpec.parse("e4m3:tensor+delayed"))
    with pytest.raises(QuantError, match="from the tensor"):
        encode(torch.randn(4, 4), QuantSpec.parse("e4m3:tensor"), scale=torch.ones(()))


@pytest.mark.parametrize("frozen", [True, False])
def test_compiles_to_one_graph_and_collects_in_backward(frozen: bool) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    quantize(model, "fp8-delayed", frozen=frozen)
    twin = copy.deepcopy(model)
    compiled = torch.compile(twin, backend="aot_eager", fullgraph=True)
    x, dy = torch.randn(8, 16), torch.randn(8, 16)
    results = []
    for run in (model, compiled):
        extra = [nn.Parameter(torch.zeros(1)), *(p for p in run.parameters() if p.requires_grad)]
        optimizer = torch.optim.SGD(extra, lr=0.1)
        for size in (1.0, 3.0):
            leaf = (x * size).requires_grad_(True)
            run(leaf).backward(dy * size)
            optimizer.step()
            optimizer.zero_grad()
        results.append(leaf.grad)
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-6)
    for (name, a), b in zip(histories(model).items(), histories(twin).values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6, msg=name)
        assert name.endswith("now") or a[2].count_nonzero() == 2
