"""Mistakes that others shipped with whole models: numbers 9 to 12 and 15 (see test_mistakes.py)."""

from __future__ import annotations

import ast
import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from bench.mutations import MUTATIONS, ROOT, Mutation
from peft import LoraConfig, get_peft_model
from tests.helpers import TINY_ARCHITECTURES, tiny_llama, tiny_model
from torch import nn
from torch.utils.checkpoint import checkpoint

from lumen.adapters.fused import fuse_lora
from lumen.adapters.merge import merge_in_place
from lumen.core import QuantError
from lumen.quant import QuantLinear, quantize

IDS = torch.arange(5, 29).reshape(2, 12)


def quantised(model: nn.Module) -> set[str]:
    return {name for name, m in model.named_modules() if isinstance(m, QuantLinear)}


def test_mistake_09_layers_1_is_not_layers_10() -> None:
    """Breaks when names are matched as prefixes or as parts of a name instead of whole dotted names."""
    model = tiny_llama(num_hidden_layers=12)
    quantize(model, {"rules": [{"match": "model.layers.1.*", "weight": "int8:row"}]})
    assert {name.split(".")[2] for name in quantised(model)} == {"1"}
    for match in ("layers.1", "layers.1.*", "model.layers.1", "q_pro", "self_attn.q_proj"):
        with pytest.raises(QuantError, match="matches no module"):
            quantize(tiny_llama(), {"rules": [{"match": match, "weight": "int8:row"}]})


@pytest.mark.parametrize("architecture", [a for a in TINY_ARCHITECTURES if a != "gpt2"])
def test_mistake_10_no_output_head_is_quantised_by_accident(architecture: str) -> None:
    """Breaks when heads are known by the name lm_head only, or when embeddings, norms or routers are reached."""
    model = tiny_model(architecture)
    head = model.get_output_embeddings()
    quantize(model, "int8")
    assert not isinstance(model.get_output_embeddings(), QuantLinear) and model.get_output_embeddings() is head
    assert not any(name.endswith(("gate", "router")) for name in quantised(model))


@pytest.mark.parametrize("name", ["embed_out", "output_layer", "head", "score", "classifier", "v_head"])
def test_mistake_10_heads_of_other_names(name: str) -> None:
    """Breaks when a head is missed because it has another name than lm_head and no getter tells of it."""
    model = nn.ModuleDict({"body": nn.Linear(64, 64), name: nn.Linear(64, 10)})
    quantize(model, "int8")
    assert quantised(model) == {"body"}


@pytest.mark.parametrize("recipe", ["fp8", "int8", "nf4", "mxfp8"])
@pytest.mark.parametrize("order", ["before", "after"])
def test_mistake_11_adapters_stay_in_high_precision(recipe: str, order: str) -> None:
    """Breaks when LoRA's factors take the dtype or the recipe of the base they hang on."""
    config = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", init_lora_weights=False)
    model: Any = tiny_llama(dtype=torch.bfloat16).requires_grad_(False)
    if order == "before":
        quantize(model, recipe, frozen=True)
        model = get_peft_model(model, config)
    else:
        model = get_peft_model(model, config)
        quantize(model, recipe, frozen=True)
    factors = {n: p for n, p in model.named_parameters() if "lora_" in n}
    assert len(factors) == 28 and len(quantised(model)) == 14
    assert all(p.dtype in (torch.float32, torch.bfloat16) and p.requires_grad for p in factors.values())
    assert not any("lora_" in name for name in quantised(model))
    model(input_ids=IDS).logits.float().square().mean().backward()
    assert all(p.grad is not None and p.grad.dtype == p.dtype and p.grad.any() for p in factors.values())


@pytest.mark.parametrize(("r", "alpha"), [(4, 4), (4, 16), (8, 2)])
def test_mistake_12_lora_is_scaled_by_alpha_over_r(r: int, alpha: int) -> None:
    """Breaks when the branch is scaled by alpha: PEFT's forward, the fused one and merge give W + alpha/r · B·A."""
    torch.manual_seed(0)
    base = tiny_llama()
    weight = base.model.layers[0].self_attn.q_proj.weight.detach().clone()
    model: Any = get_peft_model(
        copy.deepcopy(base), LoraConfig(r=r, lora_alpha=alpha, target_modules=["q_proj"], init_lora_weights=False)
    )
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    a, b = (getattr(layer, f"lora_{x}")["default"].weight.detach().clone() for x in "AB")
    x = torch.randn(3, weight.shape[1])
    want = x @ (weight + alpha / r * (b @ a)).t()
    assert torch.allclose(layer(x), want, atol=1e-5)
    assert fuse_lora(model).fused
    assert torch.allclose(layer(x), want, atol=1e-5)
    merged, _ = merge_in_place(model)
    assert torch.allclose(merged.model.layers[0].self_attn.q_proj.weight @ x.t(), want.t(), atol=1e-5)


@pytest.mark.parametrize("reentrant", [True, False])
def test_mistake_15_recomputation_does_not_pollute_amax_histories(reentrant: bool) -> None:
    """Breaks when checkpointing's second forward pushes into the histories, or uses another scale than the first did;
    or when evaluation pushes."""

    def train(checkpointed: bool) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 16))
        quantize(model, "fp8-delayed")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        outputs = []
        for step in range(4):
            x = (step + 1) * torch.randn(8, 32, generator=torch.Generator().manual_seed(step))
            x.requires_grad_(True)
            y = checkpoint(model, x, use_reentrant=reentrant) if checkpointed else model(x)
            outputs.append(y.detach().clone())
            y.backward(torch.randn(8, 16, generator=torch.Generator().manual_seed(step + 9)))
            optimizer.step()
            optimizer.zero_grad()
            model.eval()
            with torch.no_grad():
                model(100 * x.detach())
            model.train()
        return outputs, [b.clone() for name, b in model.named_buffers() if "amax" in name]

    (plain, histories), (again, recomputed) = train(False), train(True)
    assert histories and any(h.any() for h in histories)
    for a, b in zip([*plain, *histories], [*again, *recomputed], strict=True):
        assert torch.equal(a, b)
    assert max(float(h.max()) for h in histories) < 100  # what evaluation saw is not among them


def test_all_twenty_have_a_test_that_says_what_breaks_it() -> None:
    found: dict[int, list[str]] = {}
    for path in Path(__file__).parent.glob("test_mistakes*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and (match := re.match(r"test_mistake_(\d\d)_", node.name)):
                found.setdefault(int(match[1]), []).append(ast.get_docstring(node) or "")
    assert sorted(found) == list(range(1, 21))
    assert all("Breaks when" in doc for docs in found.values() for doc in docs)


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: str(mutation.number))
def test_the_breaks_of_make_mutations_still_fit_the_source(mutation: Mutation) -> None:
    """Each text to be replaced is there once, and the test it names exists; the breaks themselves take minutes."""
    for name, before, after in mutation.edits:
        assert (ROOT / "src" / "lumen" / name).read_text(encoding="utf-8").count(before) == 1 and before != after
    file, _, test = mutation.test.partition("::")
    assert f"def {test.partition('[')[0]}(" in (ROOT / file).read_text(encoding="utf-8")
