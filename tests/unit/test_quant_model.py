"""quantize and dequantize on whole models: what is touched, PEFT, saving, compile, checkpointing."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from tests.helpers import tiny_llama, tiny_model
from torch import nn

from lumen.core import QuantError
from lumen.quant import Policy, QuantLinear, dequantize, quantize
from lumen.quant.policy import PolicyBuilder

LORA = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "init_lora_weights": False}


def quantised(model: nn.Module) -> list[str]:
    return [name for name, m in model.named_modules() if isinstance(m, QuantLinear)]


def tokens(seed: int = 0, length: int = 12) -> torch.Tensor:
    return torch.randint(5, 300, (2, length), generator=torch.Generator().manual_seed(seed))


def grads(model: Any, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Gradients of a loss that weighs every logit at random: sum() would hide errors."""
    logits = model(input_ids=ids).logits
    logits.backward(torch.randn(logits.shape, generator=torch.Generator().manual_seed(1)).to(logits.dtype))
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def test_report_says_what_happened() -> None:
    model = tiny_llama(dtype=torch.bfloat16).requires_grad_(False)
    report = quantize(model, "int8")
    assert len(report.layers) == len(quantised(model)) == 14
    layer = next(x for x in report.layers if x.name == "model.layers.0.mlp.down_proj")
    assert [(g.gemm, g.left, g.kind) for g in layer.gemms] == [
        ("forward", "int8:row:absmax", "native"),
        ("dgrad", "int8:row:absmax", "native"),
    ]
    assert layer.bytes_per_parameter == 1 + 4 / 64  # one fp32 scale per row of 64
    assert report.skipped["lm_head"] == "output head" and report.skipped["model.embed_tokens"] == "embedding"
    assert "native" in str(report) and report.to_dict()["layers"]
    plain = quantize(tiny_llama(), "bf16")
    assert not plain.layers and "nothing" in str(plain)
    other = quantize(tiny_llama().requires_grad_(False), "int8", target="gfx1030")
    assert {g.kind for x in other.layers for g in x.gemms} == {"fallback"}  # dot products that torch does not use


@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("rename", ["lm_head", "weird_name"])
def test_the_head_stays(tie: bool, rename: str) -> None:
    """Not quantised by accident, whatever it is called, tied or not; a rule that names it reaches it."""
    model = tiny_llama(tie_word_embeddings=tie)
    if rename != "lm_head":
        model._modules[rename] = model._modules.pop("lm_head")
        model.get_output_embeddings = lambda: model._modules[rename]
    quantize(model, {"weight": "int8:row", "rules": [{"match": "*.q_proj", "weight": "none"}]})
    names = quantised(model)
    assert rename not in names and not any(n.endswith("q_proj") for n in names) and len(names) == 12
    dequantize(model)
    rules = [{"match": rename, "weight": "int8:row"}]
    if tie:
        with pytest.raises(QuantError, match="shares its weight"):
            quantize(model, {"rules": rules})
    else:
        quantize(model, {"rules": rules})
        assert quantised(model) == [rename]


def test_globs_are_whole_names() -> None:
    model = tiny_llama(num_hidden_layers=11)
    quantize(model, {"rules": [{"match": "model.layers.1.*", "weight": "int8:row"}]})
    assert {n.split(".")[2] for n in quantised(model)} == {"1"}
    with pytest.raises(QuantError, match="matches no module") as error:
        quantize(tiny_llama(), {"rules": [{"match": "layers.1", "weight": "int8:row"}]})
    assert "model.layers.1." in str(error.value)


def test_routers_stay_and_experts_are_quantised() -> None:
    model = tiny_model("qwen3_moe")
    report = quantize(model, "int8")
    assert not any(n.endswith("gate") for n in quantised(model))
    assert report.skipped["model.layers.0.mlp.gate"] == "router"
    assert "model.layers.0.mlp.experts.down_proj" in {x.name for x in report.layers}


def test_no_linear_layer_is_an_error_and_nothing_changes_on_error() -> None:
    with pytest.raises(QuantError, match="quantises no layer"):
        quantize(nn.Sequential(nn.Embedding(8, 8), nn.LayerNorm(8)), "int8")
    model = tiny_llama()
    for bad in (
        "fp9",
        {"weight": "int8:nope"},
        {"nonsense": 1},
        {"grad_output": "nf4+sr"},
        {"recipe": "int8", "smooth": {"alpha": 0.5}},
    ):
        with pytest.raises(QuantError):
            quantize(model, bad)
    assert not quantised(model)


def test_policy_precedence_and_gemms() -> None:
    base = {"weight": "int8:row", "input": "none", "grad_output": "int8:row", "gemms": ["forward", "dgrad"]}
    model = tiny_llama()
    quantize(model, {**base, "rules": [{"match": "model.layers.0.*", "weight": "none", "grad_output": "none"}]})
    assert all(".1." in n for n in quantised(model))
    plan = model.model.layers[1].mlp.up_proj.plan
    assert [plan.gemm(g).how for g in ("forward", "dgrad", "wgrad")] == ["dequantised", "int8", "none"]
    only = PolicyBuilder().add({"input": "int8:row"}).build()
    assert isinstance(only, Policy)
    model = tiny_llama()
    quantize(model, only)
    plan = model.model.layers[1].mlp.up_proj.plan
    assert [plan.gemm(g).how for g in ("forward", "dgrad", "wgrad")] == ["dequantised", "none", "dequantised"]


@pytest.mark.parametrize(
    "policy",
    [
        {"weight": "int8:row"},
        {"input": "int8:row"},
        {"grad_output": "int8:row"},
        {"saved_input": "int8:block32"},
        {"recipe": "int8", "saved_input": "int8:row"},
        {"weight": "int8:block32", "input": "int8:block32", "grad_output": "int8:tensor"},
    ],
)
@pytest.mark.parametrize("frozen", [True, False])  # fmt: skip
def test_every_role_alone_trains(policy: dict[str, str], frozen: bool) -> None:
    reference = tiny_llama()
    model = copy.deepcopy(reference)
    if frozen and "saved_input" in policy:  # nothing is saved for a frozen weight
        with pytest.raises(QuantError, match=r"would do nothing|quantises no layer"):
            quantize(model, policy, frozen=True)
        return
    quantize(model, policy, frozen=frozen)
    got, want = grads(model, tokens()), grads(reference, tokens())
    assert set(got) == {n for n in want if not (frozen and "proj" in n)}
    for name, grad in got.items():
        assert torch.nn.functional.cosine_similarity(grad.flatten(), want[name].flatten(), dim=0) > 0.995, name


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("order", ["before", "after"])
def test_peft_lora_trains_on_it(dora: bool, order: str) -> None:
    """The adapter of a quantised base gets the gradients of the same adapter on the dequantised base."""
    torch.manual_seed(0)
    model = tiny_llama().requires_grad_(False)
    if order == "before":
        quantize(model, "int8-weight-only")
    torch.manual_seed(1)
    peft = get_peft_model(model, LoraConfig(**LORA, use_dora=dora))
    if order == "after":
        quantize(peft, "int8-weight-only")
    assert len(quantised(peft)) == 14 and all(n.endswith("base_layer") for n in quantised(peft))
    twin = copy.deepcopy(peft)
    dequantize(twin)
    got, want = grads(peft, tokens()), grads(twin, tokens())
    assert got.keys() == want.keys() and all("lora_" in n for n in got)
    for name, grad in got.items():
        torch.testing.assert_close(grad, want[name], rtol=1e-3, atol=1e-4)
    assert all(p.dtype == torch.float32 for n, p in peft.named_parameters() if "lora_" in n)


def test_peft_merge_into_codes_raises_and_after_dequantize_works() -> None:
    model = tiny_llama()
    quantize(model, "int8", frozen=True)
    peft = get_peft_model(model, LoraConfig(**LORA))
    with pytest.raises(QuantError, match="lost"):
        copy.deepcopy(peft).merge_and_unload()
    dequantize(peft)
    want = peft(input_ids=tokens()).logits
    merged = peft.merge_and_unload()
    torch.testing.assert_close(merged(input_ids=tokens()).logits, want, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("recipe", ["int8", "int8-weight-only"])
def test_saved_model_reloads(recipe: str, tmp_path: Any) -> None:
    """compressed-tensors' keys on the disk: int8 `weight` and `weight_scale` [N, 1]."""
    model = tiny_llama(dtype=torch.bfloat16).requires_grad_(False)
    quantize(model, recipe)
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    key = "model.layers.0.mlp.up_proj.weight"
    assert saved[key].dtype == torch.int8 and saved[f"{key}_scale"].shape == (64, 1)
    other = tiny_llama(seed=3, dtype=torch.bfloat16).requires_grad_(False)
    quantize(other, recipe)
    other.load_state_dict(saved)
    assert torch.equal(other(input_ids=tokens()).logits, model(input_ids=tokens()).logits)


def test_state_dicts_load_across_forms() -> None:
    """A dense state dict is quantised into codes; codes are dequantised into a master."""
    dense = tiny_llama(seed=1)
    frozen = tiny_llama().requires_grad_(False)
    quantize(frozen, "int8")
    frozen.load_state_dict(dense.state_dict())
    want = copy.deepcopy(dense).requires_grad_(False)
    quantize(want, "int8")
    assert torch.equal(frozen(input_ids=tokens()).logits, want(input_ids=tokens()).logits)
    trained = tiny_llama()
    quantize(trained, "int8")
    trained.load_state_dict(frozen.state_dict())
    got, want_weight = trained.model.layers[0].mlp.up_proj.weight, frozen.model.layers[0].mlp.up_proj.weight
    assert torch.equal(got.detach(), want_weight)


def test_shared_module_is_quantised_once() -> None:
    shared = nn.Linear(8, 8)
    model = nn.ModuleDict({"a": shared, "b": nn.Sequential(shared)})
    quantize(model, "int8")
    assert model["a"] is model["b"][0]
    dequantize(model)
    assert model["a"] is model["b"][0] and type(model["a"]) is nn.Linear


def test_hooks_survive() -> None:
    seen = []
    model = nn.Sequential(nn.Linear(8, 8))
    handle = model[0].register_forward_hook(lambda *_: seen.append(1))
    quantize(model, "int8")
    model(torch.randn(2, 8))
    dequantize(model)
    model(torch.randn(2, 8))
    handle.remove()
    model(torch.randn(2, 8))
    assert len(seen) == 2


@pytest.mark.parametrize("frozen", [True, False])
def test_gradient_checkpointing_changes_nothing(frozen: bool) -> None:
    results = []
    for checkpointing in (False, True):
        model = tiny_llama()
        quantize(model, "int8", frozen=frozen)
        model.train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        results.append(grads(model, tokens()))
    for name, grad in results[0].items():
        assert torch.equal(grad, results[1][name]), name


@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("recipe", ["int8", "int8-weight-only", "int8-backward"])
def test_compiles_without_graph_breaks(recipe: str, frozen: bool) -> None:
    torch._dynamo.reset()  # variants that other tests compiled count against the limit
    model = nn.Sequential(nn.Linear(16, 24), nn.SiLU(), nn.Linear(24, 8, bias=False))
    quantize(model, recipe, frozen=frozen)
    x, dy = torch.randn(5, 16, requires_grad=True), torch.randn(5, 8)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    results = []
    for module in (model, compiled):
        x.grad = None
        module.zero_grad()
        y = module(x)
        y.backward(dy)
        results.append([y.detach(), x.grad, *(p.grad for p in model.parameters() if p.grad is not None)])
    for eager, traced in zip(*results, strict=True):
        torch.testing.assert_close(traced, eager, rtol=1e-5, atol=1e-5)


def test_compiled_layer_follows_the_optimizer() -> None:
    """A graph that baked the codes in would keep answering with the old weight."""
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(16, 8))
    quantize(model, "int8")
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    x = torch.randn(4, 16)
    for _ in range(3):
        y = compiled(x)
        torch.testing.assert_close(y, model(x))
        y.backward(torch.randn(4, 8))
        optimizer.step()
        optimizer.zero_grad()


def test_autocast_and_fp32_master() -> None:
    layer = nn.Sequential(nn.Linear(16, 8))
    quantize(layer, "int8")
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(torch.randn(4, 16))
    assert y.dtype == torch.bfloat16
    y.backward(torch.randn(4, 8).bfloat16())
    assert layer[0].weight.grad.dtype == torch.float32


def test_a_frozen_master_gets_no_wgrad() -> None:
    """PEFT freezes after quantising: the master is then frozen, and no wgrad product may run."""
    from lumen.kernels import trace

    model = nn.Sequential(nn.Linear(16, 8))
    quantize(model, "int8")
    model.requires_grad_(False)
    with trace() as calls:
        model(torch.randn(4, 16, requires_grad=True)).backward(torch.randn(4, 8))
    assert len(calls) == 2


@pytest.mark.parametrize("recipe", ["int8", "int8-backward", "int8-weight-only"])
def test_a_compiled_layer_with_lora_is_one_graph(recipe: str) -> None:
    """A break in a graph costs what compiling gains: the layers of a quantised LoRA model share one whole graph."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    model = tiny_llama().to(torch.bfloat16)
    quantize(model, recipe, frozen=True)
    adapted = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear"))
    model.get_input_embeddings().register_forward_hook(lambda module, args, output: output.requires_grad_())
    for layer in model.model.layers:
        layer.compile(backend="aot_eager")
    counters.clear()
    adapted(input_ids=torch.arange(2, 40)[None], use_cache=False).logits.float().square().mean().backward()
    assert not counters["graph_break"]
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("recipe", ["int8", "int8-weight-only", "mxfp4", "fp8-delayed"])
@pytest.mark.parametrize("frozen", [True, False])
def test_evaluation_compiles_without_graph_breaks(recipe: str, frozen: bool) -> None:
    """Nothing needs a gradient: an autograd function would break the graph and run eager, with warnings."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(32, 64), nn.SiLU(), nn.Linear(64, 32, bias=False))
    quantize(model, recipe, frozen=frozen)
    model.requires_grad_(False).eval()
    x = torch.randn(5, 32)
    want = model(x)
    compiled = torch.compile(model, backend="aot_eager")
    counters.clear()
    torch.testing.assert_close(compiled(x), want, rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x.clone().requires_grad_(True)), want, rtol=1e-5, atol=1e-5)
    assert not counters["graph_break"] and counters["stats"]["unique_graphs"] <= 2
