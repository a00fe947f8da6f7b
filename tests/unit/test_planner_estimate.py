"""The first memory estimate against models and memory that are really there."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tests.helpers import TINY_ARCHITECTURES, tiny_llama, tiny_model

from lumen.core.errors import ModelError
from lumen.planner import ModelShape, RunShape, estimate, run_shape, saved_for_backward

SMOLLM2 = {
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "tie_word_embeddings": True,
}


@pytest.mark.parametrize("architecture", TINY_ARCHITECTURES)
def test_the_count_is_the_models_own(architecture: str) -> None:
    model = tiny_model(architecture)
    shape = ModelShape.of(model.config)
    assert shape.total == sum(parameter.numel() for parameter in model.parameters())
    assert shape.layers == 2 and shape.vocab == model.config.get_text_config().vocab_size
    assert shape.tied == bool(model.config.get_text_config().tie_word_embeddings)


def test_smollm2_from_the_text_of_its_config() -> None:
    shape = ModelShape.of(json.loads(json.dumps(SMOLLM2)))
    assert shape.total == 134_515_008
    assert shape.linear == 30 * (2 * 576 * 576 + 2 * 576 * 192 + 3 * 576 * 1536)
    assert shape.head == 49152 * 576 and shape.tied
    # PEFT's own count for rank 8 on all linear layers.
    assert shape.lora_parameters(8) == 2_442_240
    assert shape.lora_parameters(8, ["q_proj", "v_proj"]) == 30 * 8 * (576 + 576 + 576 + 192)


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "phi3", "qwen3"])
def test_lora_count_is_pefts(architecture: str) -> None:
    model = tiny_model(architecture)
    shape = ModelShape.of(model.config)
    peft = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear"))
    assert shape.lora_parameters(4) == peft.get_nb_trainable_parameters()[0]


def really_saved(model: torch.nn.Module, rows: int, tokens: int) -> int:
    """Bytes that autograd keeps in a real forward pass on the CPU, parameters left out."""
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    saved: dict[int, int] = {}
    alive = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            saved[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model.train()
        model(input_ids=torch.zeros(rows, tokens, dtype=torch.long), use_cache=False, logits_to_keep=1)
    return sum(saved.values())


@pytest.mark.parametrize("rank", [0, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_traced_activations_are_what_a_real_forward_pass_keeps(rank: int, dtype: torch.dtype) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 160, "head_dim": 16, "vocab_size": 128}

    def real(depth: int) -> int:
        model = tiny_llama(dtype=dtype, num_hidden_layers=depth, **sizes)
        if rank:
            model = get_peft_model(model, LoraConfig(r=rank, target_modules="all-linear"))
        return really_saved(model, 2, 64)

    config = tiny_llama(**sizes).config
    traced = saved_for_backward(config, rows=2, tokens=64, dtype=dtype, lora_rank=rank)
    assert traced.layer == pytest.approx(real(3) - real(2), rel=0.02)
    assert traced.layer * 3 + traced.rest == pytest.approx(real(3), rel=0.05)


@pytest.mark.parametrize("architecture", TINY_ARCHITECTURES)
def test_every_architecture_is_traced(architecture: str) -> None:
    shape = ModelShape.of(tiny_model(architecture).config)
    plan = estimate(shape, RunShape(micro_batch=1, tokens=32))
    assert plan.parts["activations"] > 0 and not plan.notes, "a fallback to the formula is noted"


def test_where_the_code_cannot_be_traced_a_formula_is_used_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules["lumen.planner.estimate"]
    shape = ModelShape.of(SMOLLM2)
    run = RunShape(micro_batch=2, tokens=512, checkpointing=False)
    traced = estimate(shape, run)

    def cannot(*_: object, **__: object) -> None:
        raise RuntimeError("Tensor.item() cannot be called on meta tensors")

    monkeypatch.setattr(module, "saved_for_backward", cannot)
    plan = estimate(shape, run)
    assert plan.notes and "formula" in plan.table()[-1]
    assert plan.parts["activations"] == pytest.approx(traced.parts["activations"], rel=0.35)


def test_parts_add_up_and_answer_to_the_run() -> None:
    shape = ModelShape.of(SMOLLM2)
    lora = estimate(shape, RunShape(micro_batch=2, tokens=512))
    assert lora.total == sum(lora.parts.values())
    assert lora.trainable == 2_442_240 and lora.parameters == 134_515_008 + 2_442_240
    assert lora.parts["weights"] == 134_515_008 * 2
    assert lora.parts["optimizer"] == 2_442_240 * 8 and lora.parts["gradients"] == lora.parts["adapters"]
    full = estimate(shape, RunShape(micro_batch=2, tokens=512, finetuning="full"))
    assert full.parts["weights"] == 134_515_008 * 4 and full.parts["optimizer"] == 134_515_008 * 8
    assert full.parts["adapters"] == 0
    codes = estimate(shape, RunShape(micro_batch=2, tokens=512, frozen_bytes=0.516))
    assert lora.parts["weights"] - codes.parts["weights"] == pytest.approx(shape.linear * (2 - 0.516), rel=1e-6)
    kept = estimate(shape, RunShape(micro_batch=2, tokens=512, checkpointing=False))
    assert kept.parts["activations"] > 10 * lora.parts["activations"]
    longer = estimate(shape, RunShape(micro_batch=2, tokens=1024, checkpointing=False))
    assert longer.parts["activations"] == pytest.approx(2 * kept.parts["activations"], rel=0.01)
    assert any(line.startswith("total") for line in lora.table()) and len(lora.table()) == len(lora.parts) + 1


def test_a_run_configuration_becomes_numbers() -> None:
    config = SimpleNamespace(
        bf16=True,
        fp16=False,
        pure_bf16=False,
        gradient_checkpointing=None,
        disable_gradient_checkpointing=True,
        per_device_train_batch_size=4,
        cutoff_len=256,
        finetuning_type="freeze",
        lora_rank=8,
        lora_target=["all"],
        lora_dropout=0.0,
        freeze_trainable_layers=-3,
    )
    run = run_shape(config, tokens=128)
    assert (run.micro_batch, run.tokens, run.dtype, run.checkpointing) == (4, 128, "bf16", False)
    shape = ModelShape.of(SMOLLM2)
    assert estimate(shape, run).trainable == 3 * shape.layer


def test_what_transformers_does_not_know_is_named() -> None:
    with pytest.raises(ModelError, match="nosuchmodel"):
        ModelShape.of({"model_type": "nosuchmodel"})
    with pytest.raises(ModelError, match="model_type"):
        ModelShape.of({"hidden_size": 8})
    with pytest.raises(ModelError, match="causal"):
        ModelShape.of({"model_type": "vit"})
