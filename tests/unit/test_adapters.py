"""LoRA: injection, PEFT reads what we write and we read what PEFT writes, the start values, the F rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from tests.helpers import TINY_ARCHITECTURES, save_tiny, tiny_llama, tiny_model, tiny_tokenizer

from lumen.adapters.adapt import AdaptConfig, adapt
from lumen.adapters.load import load_adapter
from lumen.adapters.merge import merge_in_place
from lumen.adapters.save import save_adapter
from lumen.core import ConfigError, ModelError
from lumen.models.freeze import count_parameters
from lumen.models.load import LoadedModel, load_model

IDS = torch.tensor([[5, 6, 7, 8, 9]])


def settings(**keys: Any) -> AdaptConfig:
    return AdaptConfig(**{"lora_rank": 4, **keys})


def load(path: Path, **keys: Any) -> LoadedModel:
    return load_model(AdaptConfig(model_name_or_path=str(path), **keys), dtype=torch.float32, device="cpu")


def base(tmp_path: Path, **overrides: Any) -> Path:
    return save_tiny(tmp_path / "base", tiny_llama(**overrides))


def shake(model: Any, scale: float = 0.05, seed: int = 1) -> Any:
    """Move every trainable parameter, as training would."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += scale * torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
    return model.eval()


def train(model: Any, steps: int = 3) -> Any:
    """A few real steps."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    model.train()
    for _ in range(steps):
        model(input_ids=IDS, labels=IDS).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "rslora": {"use_rslora": True, "lora_alpha": 3},
    "dora": {"use_dora": True},
    "modules": {"additional_target": ["embed_tokens", "lm_head"]},
    "named": {"lora_target": ["q_proj", "down_proj"], "lora_dropout": 0.1},
    "gaussian": {"init_lora_weights": "gaussian"},
    "orthogonal": {"init_lora_weights": "orthogonal"},
    "pissa": {"pissa_init": True, "pissa_iter": -1},
    "pissa-fast": {"pissa_init": True},
    "pissa-rslora-dora": {"init_lora_weights": "pissa", "use_rslora": True, "use_dora": True},
    "olora": {"init_lora_weights": "olora"},
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("tied", [False, True])
def test_peft_loads_our_adapter_and_so_do_we(tmp_path: Path, variant: str, tied: bool) -> None:
    folder = base(tmp_path, tie_word_embeddings=tied)
    loaded = load(folder)
    ours = train(adapt(loaded, settings(**VARIANTS[variant])))
    save_adapter(ours, tmp_path / "adapter", {"base": str(folder)}, tokenizer=loaded.tokenizer)
    assert (logits(ours) - logits(load(folder).model)).abs().max() > 1e-2
    theirs = PeftModel.from_pretrained(load(folder).model, str(tmp_path / "adapter")).eval()
    torch.testing.assert_close(logits(theirs), logits(ours), atol=1e-5, rtol=0)
    again = load_adapter(load(folder), str(tmp_path / "adapter"))
    torch.testing.assert_close(logits(again), logits(ours), atol=1e-5, rtol=0)
    merged, report = merge_in_place(again)
    report.check()
    torch.testing.assert_close(logits(merged), logits(ours), atol=1e-5, rtol=0)
    if tied and variant != "modules":
        assert merged.lm_head.weight is merged.model.embed_tokens.weight


@pytest.mark.parametrize("keys", [{}, {"use_dora": True}, {"use_rslora": True}, {"modules_to_save": ["lm_head"]}])
def test_we_load_what_peft_wrote(tmp_path: Path, keys: dict[str, Any]) -> None:
    folder = base(tmp_path)
    theirs = get_peft_model(load(folder).model, LoraConfig(r=4, target_modules=["q_proj", "up_proj"], **keys))
    shake(theirs).save_pretrained(str(tmp_path / "adapter"), save_embedding_layers=False)
    ours = load_adapter(load(folder), str(tmp_path / "adapter"))
    torch.testing.assert_close(logits(ours), logits(theirs), atol=1e-5, rtol=0)


@pytest.mark.parametrize("architecture", TINY_ARCHITECTURES)
def test_every_architecture_adapts_saves_loads_and_merges(tmp_path: Path, architecture: str) -> None:
    folder = save_tiny(tmp_path / "base", tiny_model(architecture))
    loaded = load(folder)
    before = logits(loaded.model)
    model = adapt(loaded, settings())
    assert torch.equal(logits(model), before)
    names = {n for n, p in model.named_parameters() if p.requires_grad}
    assert names and all("lora_" in name for name in names)
    assert not any(part in name for name in names for part in ("lm_head", "embed", "wte", ".gate.", "router"))
    train(model)
    save_adapter(model, tmp_path / "adapter")
    theirs = PeftModel.from_pretrained(load(folder).model, str(tmp_path / "adapter")).eval()
    torch.testing.assert_close(logits(theirs), logits(model), atol=1e-5, rtol=0)
    want = logits(model)
    merged, report = merge_in_place(model)
    report.check()
    torch.testing.assert_close(logits(merged), want, atol=1e-5, rtol=0)


def test_four_added_tokens_survive_adapter_and_merge(tmp_path: Path) -> None:
    for tied in (False, True):
        folder = save_tiny(tmp_path / f"base{tied}", tiny_llama(tie_word_embeddings=tied))
        keys = {"add_special_tokens": ["<a>", "<b>", "<c>", "<d>"], "resize_vocab": True}
        loaded = load(folder, **keys)
        model = adapt(loaded, settings(**keys))
        ids = loaded.tokenizer("<a>x<d>", return_tensors="pt").input_ids
        assert ids.tolist()[0][0] == 320 and ids.tolist()[0][-1] == 323
        shake(model)
        want = model(ids).logits
        assert want.shape[-1] == 324
        save_adapter(model, tmp_path / f"adapter{tied}", tokenizer=loaded.tokenizer)
        again = load(folder)  # no word of the tokens: the adapter brings them
        load_adapter(again, str(tmp_path / f"adapter{tied}"))
        assert torch.equal(again.tokenizer("<a>x<d>", return_tensors="pt").input_ids, ids)
        torch.testing.assert_close(again.model(ids).logits, want, atol=1e-5, rtol=0)
        plain = load(folder).model
        plain.resize_token_embeddings(324, mean_resizing=False)
        theirs = PeftModel.from_pretrained(plain, str(tmp_path / f"adapter{tied}")).eval()
        torch.testing.assert_close(theirs(ids).logits, want, atol=1e-5, rtol=0)
        merged, _ = merge_in_place(again.model)
        torch.testing.assert_close(merged(ids).logits, want, atol=1e-5, rtol=0)
        assert (merged.lm_head.weight is merged.model.embed_tokens.weight) == tied


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_tied_embedding_and_head_train_as_one_and_merge_tied(tmp_path: Path, architecture: str) -> None:
    folder = save_tiny(tmp_path / "base", tiny_model(architecture, tie_word_embeddings=True))
    names = {"llama": ["embed_tokens", "lm_head"], "gpt2": ["wte", "lm_head"]}[architecture]
    for named in (names, names[:1], names[1:]):
        model = train(adapt(load(folder), settings(additional_target=named)))
        embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
        assert embedding.modules_to_save["default"].weight is head.modules_to_save["default"].weight
        save_adapter(model, tmp_path / "adapter")
        theirs = PeftModel.from_pretrained(load(folder).model, str(tmp_path / "adapter")).eval()
        torch.testing.assert_close(logits(theirs), logits(model), atol=1e-5, rtol=0)
        want = logits(model)
        merged, _ = merge_in_place(load_adapter(load(folder), str(tmp_path / "adapter")))
        assert merged.get_input_embeddings().weight is merged.get_output_embeddings().weight
        merged.save_pretrained(tmp_path / "merged")
        torch.testing.assert_close(logits(load_model_plain(tmp_path / "merged")), want, atol=1e-5, rtol=0)


def load_model_plain(path: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def test_adapter_on_a_tied_embedding_merges_once_into_each_use(tmp_path: Path) -> None:
    folder = base(tmp_path, tie_word_embeddings=True)
    model = shake(adapt(load(folder), settings(lora_target=["embed_tokens", "q_proj"])))
    want = logits(model)
    merged, _ = merge_in_place(model)
    torch.testing.assert_close(logits(merged), want, atol=1e-5, rtol=0)
    merged.save_pretrained(tmp_path / "merged")
    torch.testing.assert_close(logits(load_model_plain(tmp_path / "merged")), want, atol=1e-5, rtol=0)


def test_layout_on_disk_is_pefts(tmp_path: Path) -> None:
    loaded = load(base(tmp_path))
    model = shake(adapt(loaded, settings()))
    card = {"base": "tiny", "data": {"rows": 3}, "results": {"held-out loss": 1.25}, "hyperparameters": {"rank": 4}}
    save_adapter(model, tmp_path / "a", card, tokenizer=loaded.tokenizer)
    names = {p.name for p in (tmp_path / "a").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "README.md", "tokenizer.json"} <= names
    assert (tmp_path / "a" / "chat_template.jinja").read_text() == loaded.tokenizer.chat_template
    weights = load_file(tmp_path / "a" / "adapter_model.safetensors")
    key = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    assert weights[key].shape == (4, 32) and {t.dtype for t in weights.values()} == {torch.float32}
    data = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
    assert (data["r"], data["lora_alpha"], data["peft_type"], data["task_type"]) == (4, 8, "LORA", "CAUSAL_LM")
    assert data["inference_mode"] and sorted(data["target_modules"]) == data["target_modules"]
    readme = (tmp_path / "a" / "README.md").read_text()
    assert "| held-out loss | 1.25 |" in readme and 'base_model: "tiny"' in readme


def test_parameters_are_fp32_on_a_bf16_base_and_counted(tmp_path: Path) -> None:
    loaded = load_model(AdaptConfig(model_name_or_path=str(base(tmp_path))), dtype=torch.bfloat16, device="cpu")
    model = adapt(loaded, settings())
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
    count = count_parameters(model)
    per_layer = 4 * (2 * (32 + 32) + 2 * (32 + 16) + 2 * (32 + 64) + (64 + 32))
    assert count.trainable == 2 * per_layer and count.total == 39072 + count.trainable
    assert f"{count.trainable:,}" in str(count)


def test_start_values_follow_the_seed_and_nothing_else(tmp_path: Path) -> None:
    folder = base(tmp_path)
    weights = []
    for seed, stir in ((3, 0), (3, 99), (4, 0)):
        torch.manual_seed(stir)
        model = adapt(load(folder), settings(), seed=seed)
        weights.append(model.base_model.model.model.layers[0].self_attn.q_proj.lora_A["default"].weight)
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"lora_target": ["q_porj"]}, "no module is called q_porj"),
        ({"additional_target": ["head"]}, "no module is called head"),
        ({"init_lora_weights": "loftq"}, "loftq is not supported"),
        ({"init_lora_weights": "eva"}, "eva is not supported"),
        ({"init_lora_weights": "pizza"}, "pizza is unknown"),
        ({"init_lora_weights": "olora", "pissa_init": True}, "contradict"),
        ({"lora_target": ["lm_head"], "additional_target": ["lm_head"]}, "in lora_target and in additional_target"),
        ({"finetuning_type": "full", "adapter_name_or_path": "x"}, "does not go with finetuning_type: full"),
        ({"adapter_name_or_path": "./nowhere"}, "there is no adapter"),
    ],
)
def test_what_cannot_be_says_so(tmp_path: Path, keys: dict[str, Any], says: str) -> None:
    with pytest.raises((ConfigError, ModelError), match=says) as caught:
        adapt(load(base(tmp_path)), settings(**keys))
    assert caught.value.where and caught.value.fix
    if "q_porj" in says:
        assert "did you mean q_proj?" in caught.value.fix and "down_proj" in caught.value.fix


def test_an_adapter_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    save_adapter(shake(adapt(load(base(tmp_path)), settings())), tmp_path / "a")
    wide = save_tiny(tmp_path / "wide", tiny_llama(hidden_size=48))
    with pytest.raises(ModelError, match="does not fit"):
        load_adapter(load(wide), str(tmp_path / "a"))
    short = save_tiny(tmp_path / "short", tiny_llama(num_hidden_layers=1))
    with pytest.raises(ModelError, match=r"14 have no place"):
        load_adapter(load(short), str(tmp_path / "a"))
    deep = save_tiny(tmp_path / "deep", tiny_llama(num_hidden_layers=3))
    with pytest.raises(ModelError, match=r"14 tensors are missing"):
        load_adapter(load(deep), str(tmp_path / "a"))
    (tmp_path / "a" / "adapter_model.safetensors").rename(tmp_path / "a" / "adapter_model.bin")
    with pytest.raises(ModelError, match="pickled"):
        load_adapter(load(tmp_path / "base"), str(tmp_path / "a"))


def test_continue_merge_several_and_start_anew(tmp_path: Path) -> None:
    folder = base(tmp_path)
    first = shake(adapt(load(folder), settings()), seed=1)
    save_adapter(first, tmp_path / "one")
    second = load(folder)
    model = adapt(second, settings(adapter_name_or_path=str(tmp_path / "one")))
    torch.testing.assert_close(logits(model), logits(first), atol=1e-6, rtol=0)
    assert any(p.requires_grad for p in model.parameters())
    plain, _ = merge_in_place(model)
    stacked = shake(adapt(second_with(second, plain), settings(lora_target=["q_proj"])), seed=2)
    save_adapter(stacked, tmp_path / "two")
    both = f"{tmp_path / 'one'},{tmp_path / 'two'}"
    continued = adapt(load(folder), settings(adapter_name_or_path=both))
    torch.testing.assert_close(logits(continued), logits(stacked), atol=1e-5, rtol=0)
    fresh = adapt(load(folder), settings(adapter_name_or_path=both, create_new_adapter=True, lora_rank=2))
    torch.testing.assert_close(logits(fresh), logits(stacked), atol=1e-5, rtol=0)
    assert fresh.peft_config["default"].r == 2


def second_with(loaded: LoadedModel, model: Any) -> LoadedModel:
    loaded.model = model
    return loaded


def test_merging_an_untrained_adapter_fails_loudly(tmp_path: Path) -> None:
    _, report = merge_in_place(adapt(load(base(tmp_path)), settings()))
    with pytest.raises(ModelError, match="identical to the base"):
        report.check()
    with pytest.raises(ModelError, match="identical to the base"):
        report.check(allow_unchanged=True)


def test_merging_where_one_target_did_not_move_names_it(tmp_path: Path) -> None:
    model = shake(adapt(load(base(tmp_path)), settings()))
    torch.nn.init.zeros_(model.base_model.model.model.layers[1].mlp.up_proj.lora_B["default"].weight)
    _, report = merge_in_place(model)
    with pytest.raises(ModelError, match="1 of 14 targets") as caught:
        report.check()
    assert caught.value.where == "model.layers.1.mlp.up_proj"
    report.check(allow_unchanged=True)


def test_a_change_that_the_cast_loses_is_an_error(tmp_path: Path) -> None:
    loaded = load_model(AdaptConfig(model_name_or_path=str(base(tmp_path))), dtype=torch.bfloat16, device="cpu")
    with torch.no_grad():
        for parameter in loaded.model.parameters():
            parameter.fill_(0.02)
    _, report = merge_in_place(shake(adapt(loaded, settings()), scale=1e-6))
    with pytest.raises(ModelError, match="lost when the merged weights are cast"):
        report.check()


def test_a_broken_bitsandbytes_is_harmless(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bitsandbytes").mkdir()
    (tmp_path / "bitsandbytes" / "__init__.py").write_text("raise RuntimeError('libbitsandbytes_rocm82.so not found')")
    monkeypatch.syspath_prepend(str(tmp_path))
    folder = base(tmp_path)
    model = shake(adapt(load(folder), settings()))
    save_adapter(model, tmp_path / "a")
    torch.testing.assert_close(logits(load_adapter(load(folder), str(tmp_path / "a"))), logits(model))


def test_gradient_checkpointing_with_frozen_embeddings_moves_every_lora_b(tmp_path: Path) -> None:
    model = adapt(load(base(tmp_path)), settings())
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    before = {n: p.detach().clone() for n, p in model.named_parameters() if "lora_B" in n}
    train(model, steps=1)
    assert len(before) == 14
    for name, parameter in model.named_parameters():
        if name in before:
            assert not torch.equal(parameter, before[name]), name


def test_full_and_freeze_train_what_they_say(tmp_path: Path) -> None:
    folder = base(tmp_path)
    model = adapt(load(folder), settings(finetuning_type="full"))
    assert all(p.requires_grad for p in model.parameters())
    model = adapt(load(folder), settings(finetuning_type="freeze", freeze_trainable_layers=1))
    assert {n.split(".")[2] for n, p in model.named_parameters() if p.requires_grad} == {"1"}
    assert count_parameters(model).percent < 30


def test_pad_less_tokenizer_saves_its_pad_with_the_adapter(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "base", tokenizer=tiny_tokenizer(pad=False))
    loaded = load(folder)
    save_adapter(shake(adapt(loaded, settings())), tmp_path / "a", tokenizer=loaded.tokenizer)
    again = load(folder)
    load_adapter(again, str(tmp_path / "a"))
    assert again.tokenizer.pad_token == "<|pad|>"


@pytest.mark.parametrize("recipe", ["int8-weight-only", "int8"])
def test_on_a_quantised_base_lora_trains_counts_and_merges_into_what_it_computed_with(
    tmp_path: Path, recipe: str
) -> None:
    from lumen.quant.api import dequantize, quantize
    from lumen.quant.linear import QuantLinear

    loaded = load(base(tmp_path))
    quantize(loaded.model, recipe, frozen=True)
    model = adapt(loaded, settings())
    assert count_parameters(model).total == 39072 + count_parameters(model).trainable
    train(model)
    plain = load(tmp_path / "base").model
    quantize(plain, recipe, frozen=True)
    dequantize(plain)
    save_adapter(model, tmp_path / "a")
    want = logits(PeftModel.from_pretrained(plain, str(tmp_path / "a")).eval())
    merged, report = merge_in_place(model)
    report.check()
    assert not any(isinstance(m, QuantLinear) for m in merged.modules())
    torch.testing.assert_close(logits(merged), want, atol=1e-5, rtol=0)
    with pytest.raises(ConfigError, match="stored as codes"):
        again = load(tmp_path / "base")
        quantize(again.model, recipe, frozen=True)
        adapt(again, settings(init_lora_weights="pissa"))


def test_a_continued_adapters_vocabulary_is_there_before_rows_are_tokenised(tmp_path: Path) -> None:
    from lumen.adapters.load import adopt_vocabulary

    folder = base(tmp_path)
    first = load(folder, add_special_tokens=["<a>"])
    save_adapter(shake(adapt(first, settings(add_special_tokens=["<a>"]))), tmp_path / "a", tokenizer=first.tokenizer)
    second = load(folder)
    adopt_vocabulary(second, [str(tmp_path / "a")])
    assert second.tokenizer("<a>")["input_ids"] == [320] and second.model.config.vocab_size == 321
    model = adapt(second, settings(adapter_name_or_path=str(tmp_path / "a")))
    torch.testing.assert_close(logits(model), logits(first.model), atol=1e-5, rtol=0)
