"""Quantising while loading equals loading first; checkpoints of codes load as codes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.helpers import save_tiny, smollm2_gguf, tiny_llama, tiny_model, tiny_tokenizer

from lumen.core import ModelError, QuantError
from lumen.models.config import ModelConfig
from lumen.models.load import load_model
from lumen.quant import QuantLinear, quantize
from lumen.quant.stream import Stream

ARCHITECTURES = ["llama", "qwen3", "gemma3_text", "phi3"]


def directory(tmp_path: Path, model: Any, *, shard: str = "50GB") -> ModelConfig:
    model.save_pretrained(tmp_path, max_shard_size=shard)
    tiny_tokenizer().save_pretrained(tmp_path)
    return ModelConfig(model_name_or_path=str(tmp_path))


def same_state(a: Any, b: Any) -> None:
    first, second = a.state_dict(), b.state_dict()
    assert list(first) == list(second)
    for key, value in first.items():
        other = second[key]
        assert value.dtype == other.dtype and value.device == other.device, key
        assert torch.equal(value.float(), other.float()), key


@pytest.mark.parametrize("recipe", ["nf4", "int8", "int8-backward", "mxfp8"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_streaming_equals_loading_first(architecture: str, recipe: str, tmp_path: Path) -> None:
    """Bit for bit, in shards, in bf16; the frozen ones are codes and nothing is left on the meta device."""
    config = directory(tmp_path, tiny_model(architecture), shard="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    streamed = load_model(config, dtype=torch.bfloat16, device="cpu", stream=Stream(recipe))
    first = load_model(config, dtype=torch.bfloat16, device="cpu")
    report = quantize(first.model, recipe, frozen=True)
    assert streamed.quant is not None and streamed.quant.layers == report.layers
    same_state(streamed.model, first.model)
    assert not any(p.is_meta for p in [*streamed.model.parameters(), *streamed.model.buffers()])
    ids = torch.arange(5, 21)[None]
    assert torch.equal(streamed.model(input_ids=ids).logits, first.model(input_ids=ids).logits)
    assert not hasattr(streamed.model.config, "quantization_config") and not hasattr(streamed.model, "hf_quantizer")
    assert streamed.model.generation_config.to_dict() == first.model.generation_config.to_dict()


def test_tied_embeddings_stay_tied(tmp_path: Path) -> None:
    config = directory(tmp_path, tiny_llama(tie_word_embeddings=True))
    model = load_model(config, device="cpu", stream=Stream("nf4")).model
    assert model.lm_head.weight is model.model.embed_tokens.weight
    with pytest.raises(QuantError, match="shares its weight"):
        load_model(config, device="cpu", stream=Stream({"rules": [{"match": "lm_head", "weight": "nf4"}]}))


def test_no_two_dense_weights_are_alive_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if tensors are read ahead: every dense weight handed over is gone when the next comes."""
    import weakref

    config = directory(tmp_path, tiny_llama())
    alive: list[Any] = []
    original = Stream.take

    def take(self: Stream, model: Any, name: str, value: Any) -> None:
        assert sum(ref() is not None for ref in alive) == 0, name
        alive.append(weakref.ref(value))
        original(self, model, name, value)

    monkeypatch.setattr(Stream, "take", take)
    load_model(config, device="cpu", stream=Stream("nf4"))
    assert len(alive) == 14


def test_gguf_streams_too() -> None:
    config = ModelConfig(model_name_or_path=str(smollm2_gguf()))
    recipe = {"rules": [{"match": "model.layers.7.*", "weight": "nf4"}]}  # all of them would take a while
    streamed = load_model(config, dtype=torch.bfloat16, device="cpu", stream=Stream(recipe)).model
    first = load_model(config, dtype=torch.bfloat16, device="cpu").model
    quantize(first, recipe, frozen=True)
    same_state(streamed, first)


def test_incomplete_checkpoints_are_named(tmp_path: Path) -> None:
    config = directory(tmp_path, tiny_llama())
    file = tmp_path / "model.safetensors"
    state = load_file(file)
    dropped = {k: v for k, v in state.items() if "layers.1.mlp.up_proj" not in k}
    save_file(dropped, file, metadata={"format": "pt"})
    with pytest.raises(QuantError, match=r"layers\.1\.mlp\.up_proj"):
        load_model(config, device="cpu", stream=Stream("nf4"))
    key = "model.layers.1.mlp.up_proj.weight"
    save_file({**state, key: state[key][:10].contiguous()}, file, metadata={"format": "pt"})
    with pytest.raises(QuantError, match="the model wants"):
        load_model(config, device="cpu", stream=Stream("nf4"))


def test_stored_in_nf4_by_transformers_and_bitsandbytes(tmp_path: Path) -> None:
    """A checkpoint that transformers and bitsandbytes wrote loads as codes; its bytes come back."""
    pytest.importorskip("bitsandbytes")
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    save_tiny(tmp_path / "dense", tiny_llama(hidden_size=64, intermediate_size=128, head_dim=16, dtype=torch.bfloat16))
    settings = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path / "dense", quantization_config=settings, dtype=torch.bfloat16, device_map={"": "cpu"}
    )
    theirs.save_pretrained(tmp_path / "bnb")
    tiny_tokenizer().save_pretrained(tmp_path / "bnb")
    config = ModelConfig(model_name_or_path=str(tmp_path / "bnb"))
    loaded = load_model(config, device="cpu")
    ours = loaded.model
    assert loaded.quant is not None and len(loaded.quant.layers) == 14
    assert isinstance(ours.model.layers[0].mlp.up_proj, QuantLinear)
    saved = load_file(tmp_path / "bnb" / "model.safetensors")
    state = ours.state_dict()
    for key, value in saved.items():
        if "quant_state" not in key:
            assert torch.equal(state[key], value) and state[key].dtype == value.dtype, key
    ids = torch.arange(5, 21)[None]
    torch.testing.assert_close(ours(input_ids=ids).logits, theirs(input_ids=ids).logits, rtol=0.02, atol=0.02)
    with pytest.raises(QuantError, match="the checkpoint stores this weight as nf4"):
        load_model(config, device="cpu", stream=Stream("int8"))
    same = load_model(config, device="cpu", stream=Stream("nf4")).model
    same_state(same, ours)


def test_other_codes_are_refused_by_name(tmp_path: Path) -> None:
    import json

    config = directory(tmp_path, tiny_llama())
    path = tmp_path / "config.json"
    plain = json.loads(path.read_text())
    plain["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    path.write_text(json.dumps(plain))
    with pytest.raises(ModelError, match=r"LLM\.int8 is not read"):
        load_model(config, device="cpu")


@pytest.mark.parametrize(
    ("architecture", "recipe"),
    [("llama", "nf4"), ("llama", "int8-weight-only"), ("llama", "int4"), ("llama", "mxfp8"), ("mixtral", "nf4")],
)
def test_saved_codes_load_with_the_same_bytes(architecture: str, recipe: str, tmp_path: Path) -> None:
    """In shards; the config names the format, so nothing reads codes as weights."""
    from lumen.models.save_codes import save_codes

    model = tiny_model(architecture, dtype=torch.bfloat16, tie_word_embeddings=architecture == "llama")
    quantize(model, recipe, frozen=True)
    save_codes(model, tmp_path, max_shard_size="30KB")
    tiny_tokenizer().save_pretrained(tmp_path)
    loaded = load_model(ModelConfig(model_name_or_path=str(tmp_path)), device="cpu")
    assert loaded.quant is not None
    first, second = model.state_dict(), loaded.model.state_dict()
    assert set(first) == set(second)
    for key, value in first.items():
        assert value.dtype == second[key].dtype and torch.equal(value.float(), second[key].float()), key
    dense = tiny_model(architecture)
    with pytest.raises(ModelError, match="no weight"):
        save_codes(dense, tmp_path / "x")


def test_transformers_loads_our_nf4_directory(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    from transformers import AutoModelForCausalLM

    from lumen.models.save_codes import save_codes

    model = tiny_llama(hidden_size=64, intermediate_size=128, head_dim=16, dtype=torch.bfloat16)
    quantize(model, "nf4", frozen=True)
    save_codes(model, tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16, device_map={"": "cpu"})
    weight = theirs.model.layers[0].mlp.up_proj.weight
    assert type(weight).__name__ == "Params4bit" and weight.quant_state.nested
    ours = model.model.layers[0].mlp.up_proj
    assert torch.equal(weight.data.reshape(-1), ours._parameters["weight"].reshape(-1))
    ids = torch.arange(5, 21)[None]
    torch.testing.assert_close(theirs(input_ids=ids).logits, model(input_ids=ids).logits, rtol=0.02, atol=0.02)


def test_merging_into_a_base_of_codes_writes_plain_weights(tmp_path: Path) -> None:
    """Fails if a layer without an adapter stays codes: its bytes would be read as weights."""
    from lumen.adapters.config import AdapterConfig
    from lumen.adapters.inject import inject
    from lumen.adapters.save import save_adapter
    from lumen.models.save_codes import save_codes

    base = tiny_llama(dtype=torch.bfloat16)
    quantize(base, "nf4", frozen=True)
    save_codes(base, tmp_path / "base")
    tiny_tokenizer().save_pretrained(tmp_path / "base")
    config = ModelConfig(model_name_or_path=str(tmp_path / "base"))
    adapted = inject(load_model(config, device="cpu").model, AdapterConfig(lora_rank=2, lora_target=["q_proj"]))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.05)
    save_adapter(adapted, tmp_path / "adapter")
    from lumen.export.merge import MergeConfig, merge

    merge(
        MergeConfig(
            model_name_or_path=str(tmp_path / "base"),
            adapter_name_or_path=[str(tmp_path / "adapter")],
            export_dir=str(tmp_path / "merged"),
        )
    )
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    assert all(v.dtype == torch.bfloat16 for v in merged.values()), {k: v.dtype for k, v in merged.items()}
    up = base.model.layers[0].mlp.up_proj.weight
    assert torch.equal(merged["model.layers.0.mlp.up_proj.weight"], up)
