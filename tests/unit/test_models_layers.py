"""Names of layers in every architecture, targets, freezing, counting; the sources of a name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.helpers import TINY_ARCHITECTURES, save_tiny, smollm2_gguf, tiny_llama, tiny_model

from lumen.core import ModelError
from lumen.models.config import ModelConfig
from lumen.models.freeze import apply_freeze, count_parameters, freeze_all, train_all
from lumen.models.layers import (
    decoder_layers,
    embedding_name,
    head_name,
    layer_names,
    linear_names,
    matches,
    resolve_targets,
)
from lumen.models.load import load_model
from lumen.models.source import resolve_source

LAYERS = {"gpt2": "transformer.h"}
TARGETS = {
    "phi3": {"qkv_proj", "o_proj", "gate_up_proj", "down_proj"},
    "gpt2": {"c_attn", "c_proj", "c_fc"},
    "mixtral": {"q_proj", "k_proj", "v_proj", "o_proj"},
    "qwen3_moe": {"q_proj", "k_proj", "v_proj", "o_proj"},
}
DENSE = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


@pytest.mark.parametrize("architecture", TINY_ARCHITECTURES)
def test_parts_of_every_architecture(architecture: str) -> None:
    model = tiny_model(architecture)
    name, layers = decoder_layers(model)
    assert name == LAYERS.get(architecture, "model.layers") and len(layers) == 2
    assert layer_names(model) == [f"{name}.0", f"{name}.1"]
    assert model.get_submodule(embedding_name(model)) is model.get_input_embeddings()
    assert head_name(model) == "lm_head"
    assert {n.rpartition(".")[2] for n in linear_names(model)} == TARGETS.get(architecture, DENSE)
    assert set(resolve_targets(model, ["all"])) == TARGETS.get(architecture, DENSE)


def test_all_never_takes_a_router_or_head_also_when_their_name_is_shared() -> None:
    model = tiny_llama()
    model.config.num_experts = 4
    for layer in model.model.layers:
        layer.mlp.gate = torch.nn.Linear(32, 4)
        layer.mlp.other = torch.nn.Module()
        layer.mlp.other.gate = torch.nn.Linear(32, 4)
        layer.mlp.expert = torch.nn.Module()
        layer.mlp.expert.q_proj = torch.nn.Linear(32, 4)  # one output per expert: a router by another name
    targets = resolve_targets(model, ["all"])
    assert "gate" not in targets and "q_proj" not in targets
    assert "model.layers.0.self_attn.q_proj" in targets and "model.layers.0.mlp.expert.q_proj" not in targets


def test_names_match_whole_parts_only() -> None:
    assert matches("model.layers.1.mlp", "layers.1.mlp") and matches("q_proj", "q_proj")
    assert not matches("model.layers.10.mlp", "0.mlp") and not matches("a.my_q_proj", "q_proj")


def trainable(model: torch.nn.Module) -> set[str]:
    return {name for name, p in model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("architecture", TINY_ARCHITECTURES)
def test_freeze_first_and_last_layers(architecture: str) -> None:
    model = tiny_model(architecture)
    name, _ = decoder_layers(model)
    every = {n for n, _ in model.named_parameters()}
    assert set(apply_freeze(model, ModelConfig(freeze_trainable_layers=1))) == trainable(model)
    assert trainable(model) == {n for n in every if n.startswith(f"{name}.1.")}
    apply_freeze(model, ModelConfig(freeze_trainable_layers=-1))
    assert trainable(model) == {n for n in every if n.startswith(f"{name}.0.")}
    train_all(model)
    assert count_parameters(model).percent == 100.0
    freeze_all(model)
    assert count_parameters(model).trainable == 0


def test_freeze_named_modules_and_extra_ones() -> None:
    model = tiny_llama(num_hidden_layers=12)
    config = ModelConfig(
        freeze_trainable_layers=2,
        freeze_trainable_modules=["mlp", "input_layernorm"],
        freeze_extra_modules="norm,lm_head",
    )
    apply_freeze(model, config, also=["embed_tokens"])
    got = trainable(model)
    assert {n.split(".")[2] for n in got if ".layers." in n} == {"10", "11"}  # and not 1, whose name 11 ends in
    assert "model.layers.10.mlp.up_proj.weight" in got and "model.layers.10.input_layernorm.weight" in got
    assert not any("self_attn" in n or "post_attention" in n for n in got)
    assert {"model.norm.weight", "lm_head.weight", "model.embed_tokens.weight"} <= got
    model(torch.tensor([[5, 6]])).logits.sum().backward()
    assert all((p.grad is not None) == p.requires_grad for p in model.parameters())


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"freeze_trainable_layers": 0}, "has 2 decoder layers"),
        ({"freeze_trainable_layers": 3}, "has 2 decoder layers"),
        ({"freeze_trainable_modules": ["atention"]}, "no module is called atention"),
        ({"freeze_extra_modules": ["headd"]}, "no module is called headd"),
        ({"freeze_extra_modules": ["q_proj"]}, "no module is called q_proj"),
    ],
)
def test_freezing_what_is_not_there_says_so(keys: dict[str, object], says: str) -> None:
    with pytest.raises(ModelError, match=says) as caught:
        apply_freeze(tiny_llama(), ModelConfig(**{"freeze_trainable_layers": 1, **keys}))
    assert caught.value.where in keys and caught.value.fix


def test_tied_parameters_count_once() -> None:
    tied, untied = tiny_llama(tie_word_embeddings=True), tiny_llama()
    assert count_parameters(untied).total - count_parameters(tied).total == 320 * 32


def test_names_that_mean_a_model(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    for name in (tmp_path, tmp_path / "m.gguf"):
        source = resolve_source(ModelConfig(model_name_or_path=str(name)))
        assert (source.kind, source.gguf_file) == ("gguf", "m.gguf")
        assert source.reference == str((tmp_path / "m.gguf").resolve())
    hub = resolve_source(ModelConfig(model_name_or_path="org/model", model_revision="v2"))
    assert (hub.kind, hub.revision, hub.reference) == ("hub", "v2", "org/model")
    gguf = resolve_source(ModelConfig(model_name_or_path="org/model/model-q4.gguf"))
    assert (gguf.kind, gguf.path, gguf.gguf_file) == ("gguf", "org/model", "model-q4.gguf")
    sample = smollm2_gguf()
    assert str(resolve_source(ModelConfig(model_name_or_path="SmolLM2"))) == str(sample)


def test_an_adapter_names_an_absolute_base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tiny(tmp_path / "base")
    monkeypatch.chdir(tmp_path)
    loaded = load_model(ModelConfig(model_name_or_path="base"), device="cpu")
    assert loaded.model.config.name_or_path == str((tmp_path / "base").resolve())
