"""Loading: HF directory, GGUF, what is not there; padding, added tokens, tied embeddings."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.helpers import TINY_ARCHITECTURES, save_tiny, tiny_llama, tiny_model, tiny_tokenizer

from lumen.core import ConfigError, HardwareError, ModelError
from lumen.core.log import forget_notes, notes
from lumen.models.config import ModelConfig
from lumen.models.device import attention_implementation, choose_device
from lumen.models.load import load_model, upcast_norms
from lumen.models.source import resolve_source


def config(path: object, **keys: object) -> ModelConfig:
    return ModelConfig(model_name_or_path=str(path), **keys)


@pytest.mark.parametrize("architecture", TINY_ARCHITECTURES)
def test_every_architecture_loads_with_the_logits_it_was_saved_with(tmp_path: Path, architecture: str) -> None:
    model = tiny_model(architecture)
    save_tiny(tmp_path, model)
    loaded = load_model(config(tmp_path), dtype=torch.float32, device="cpu")
    ids = torch.tensor([[5, 6, 7, 8]])
    assert torch.equal(loaded.model(ids).logits, model(ids).logits)
    assert loaded.source.kind == "directory" and not loaded.model.training


def test_dtype_is_the_one_asked_for_or_the_checkpoints(tmp_path: Path) -> None:
    save_tiny(tmp_path, tiny_llama(dtype=torch.bfloat16))
    assert load_model(config(tmp_path), device="cpu").dtype == torch.bfloat16
    loaded = load_model(config(tmp_path), dtype=torch.float32, device="cpu")
    assert {p.dtype for p in loaded.model.parameters()} == {torch.float32}


def test_random_weights_differ_from_the_checkpoint_and_follow_the_seed(tmp_path: Path) -> None:
    save_tiny(tmp_path)
    weights = []
    for _ in range(2):
        torch.manual_seed(7)
        loaded = load_model(config(tmp_path, train_from_scratch=True), dtype=torch.float32, device="cpu")
        weights.append(loaded.model.model.layers[0].mlp.up_proj.weight)
    assert torch.equal(*weights)
    assert not torch.equal(weights[0], tiny_llama().model.layers[0].mlp.up_proj.weight)


def test_tied_embeddings_stay_one_parameter(tmp_path: Path) -> None:
    save_tiny(tmp_path, tiny_llama(tie_word_embeddings=True))
    model = load_model(config(tmp_path), dtype=torch.float32, device="cpu").model
    assert model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.parametrize(
    ("name", "says"),
    [
        (None, "no model was given"),
        ("./nowhere/model", "there is no model at"),
        ("model.gguf", "there is no model at"),
        ("{tmp}/empty", "holds no model"),
        ("{tmp}/adapter", "holds an adapter, not a model"),
        ("{tmp}/two", "holds 2 GGUF files"),
        ("{tmp}/two/notes.txt", "not a GGUF model"),
    ],
)
def test_what_is_not_a_model_says_so(tmp_path: Path, name: str | None, says: str) -> None:
    for folder in ("empty", "adapter", "two"):
        (tmp_path / folder).mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text('{"base_model_name_or_path": "the/base"}')
    for file in ("a.gguf", "b.gguf", "notes.txt"):
        (tmp_path / "two" / file).write_text("x")
    with pytest.raises(ModelError, match=says) as caught:
        resolve_source(ModelConfig(model_name_or_path=name and name.format(tmp=tmp_path)))
    assert caught.value.where and caught.value.fix


def test_damaged_files_say_so(tmp_path: Path) -> None:
    save_tiny(tmp_path / "weights")
    (tmp_path / "weights" / "model.safetensors").write_bytes(b"\0" * 100)
    with pytest.raises(ModelError, match="cannot be loaded"):
        load_model(config(tmp_path / "weights"), device="cpu")
    save_tiny(tmp_path / "config")
    (tmp_path / "config" / "config.json").write_text("{")
    with pytest.raises(ModelError):
        load_model(config(tmp_path / "config"), device="cpu")
    (tmp_path / "broken.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelError):
        load_model(config(tmp_path / "broken.gguf"), device="cpu")
    save_tiny(tmp_path / "tokenizer")
    for file in (tmp_path / "tokenizer").glob("tokenizer*"):
        file.unlink()
    with pytest.raises(ModelError, match="tokenizer"):
        load_model(config(tmp_path / "tokenizer"), device="cpu")


def test_hub_id_without_a_network_is_an_error_not_a_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match="nor reachable on the hub") as caught:
        load_model(config("some-org/some-model", cache_dir=str(tmp_path)), device="cpu")
    assert "downloaded model" in caught.value.fix


def test_a_model_that_ships_code_is_refused_whatever_the_file_says(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "mine", "auto_map": {"AutoConfig": "code.Config"}}')
    (tmp_path / "code.py").write_text("raise SystemExit('the code ran')")
    with pytest.raises(ModelError, match="needs code that it ships itself") as caught:
        load_model(config(tmp_path, trust_remote_code=True), device="cpu")
    assert "--allow-remote-code" in caught.value.fix


def test_trust_remote_code_on_a_built_in_architecture_is_a_noted_no_op(tmp_path: Path) -> None:
    forget_notes()
    save_tiny(tmp_path)
    load_model(config(tmp_path, trust_remote_code=True), device="cpu")
    assert any("trust_remote_code" in line for line in notes())


def test_padding_is_never_eos_and_does_not_grow_the_model(tmp_path: Path) -> None:
    save_tiny(tmp_path, tokenizer=tiny_tokenizer(pad=False))
    loaded = load_model(config(tmp_path), device="cpu")
    assert loaded.tokenizer.pad_token == "<|pad|>" and loaded.tokenizer.pad_token_id == 3
    assert loaded.model.config.pad_token_id == 3 == loaded.model.generation_config.pad_token_id
    assert loaded.model.get_input_embeddings().weight.shape[0] == 320


def test_padding_that_is_eos_is_replaced_and_the_row_trains_again(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer(pad=False)
    tokenizer.pad_token = tokenizer.eos_token
    save_tiny(tmp_path, tiny_llama(pad_token_id=2), tokenizer)
    loaded = load_model(config(tmp_path), dtype=torch.float32, device="cpu")
    assert loaded.tokenizer.pad_token_id not in loaded.end_token_ids
    loaded.model(torch.tensor([[2, 5]])).logits.sum().backward()
    assert loaded.model.get_input_embeddings().weight.grad[2].abs().sum() > 0


def test_added_tokens_get_the_mean_row_in_embedding_and_head(tmp_path: Path) -> None:
    save_tiny(tmp_path)
    loaded = load_model(
        config(tmp_path, add_tokens="<a>,<b>", add_special_tokens=["<c>", "<d>"], resize_vocab=True),
        dtype=torch.float32,
        device="cpu",
    )
    model, tokenizer = loaded.model, loaded.tokenizer
    assert loaded.new_tokens == ["<a>", "<b>", "<c>", "<d>"]
    assert tokenizer.convert_tokens_to_ids(["<a>", "<d>"]) == [320, 323]
    assert tokenizer.decode(tokenizer("x<c>y<a>")["input_ids"], skip_special_tokens=True) == "xy<a>"
    for weight in (model.model.embed_tokens.weight, model.lm_head.weight):
        assert weight.shape[0] == 324
        assert torch.allclose(weight[320:], weight[:320].mean(0).expand(4, -1), atol=1e-7)
    assert loaded.vocabulary_modules == ["embed_tokens", "lm_head"] and model.config.vocab_size == 324


def test_added_tokens_on_a_tied_model_stay_tied(tmp_path: Path) -> None:
    save_tiny(tmp_path, tiny_llama(tie_word_embeddings=True))
    loaded = load_model(config(tmp_path, add_tokens=["<a>"]), dtype=torch.float32, device="cpu")
    assert loaded.model.lm_head.weight is loaded.model.model.embed_tokens.weight
    assert loaded.vocabulary_modules == ["embed_tokens"]


def test_flash_attention_that_is_missing_falls_back_with_one_line(tmp_path: Path) -> None:
    forget_notes()
    save_tiny(tmp_path)
    for _ in range(2):
        loaded = load_model(config(tmp_path, flash_attn="fa2"), device="cpu")
    assert loaded.model.config._attn_implementation == "sdpa"
    assert len([line for line in notes() if "fa2" in line]) == 1
    loaded = load_model(config(tmp_path, flash_attn="disabled"), device="cpu")
    assert loaded.model.config._attn_implementation == "eager"


def test_flash_attention_that_breaks_while_imported_falls_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forget_notes()
    (tmp_path / "flash_attn.py").write_text("raise OSError('undefined symbol')")
    monkeypatch.syspath_prepend(str(tmp_path))
    device = torch.device("cuda", 0)
    assert attention_implementation(ModelConfig(flash_attn="fa2"), device) == "sdpa"
    assert any("OSError" in line for line in notes())


def test_devices() -> None:
    assert choose_device("cpu").type == "cpu"
    with pytest.raises(ConfigError, match="not a device"):
        choose_device("gpu9x")
    with pytest.raises(HardwareError, match="is not there"):
        choose_device("cuda:99")


def test_upcast_norms_keeps_the_stream_in_the_models_dtype() -> None:
    model = tiny_llama(dtype=torch.bfloat16)
    assert upcast_norms(model) == 5
    assert model.model.norm.weight.dtype == torch.float32
    assert model(torch.tensor([[5, 6]])).logits.dtype == torch.bfloat16


def test_pickled_weights_are_not_read(tmp_path: Path) -> None:
    model = tiny_llama()
    save_tiny(tmp_path, model)
    (tmp_path / "model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelError, match="pickled weights only"):
        load_model(config(tmp_path), device="cpu")
