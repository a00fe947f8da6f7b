"""lumen merge and export: the directory on the disk answers like the adapted model, in plain transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from tests.helpers import save_tiny, tiny_llama, tiny_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from lumen.adapters.adapt import AdaptConfig, adapt
from lumen.adapters.save import save_adapter
from lumen.cli.main import run
from lumen.core import ConfigError, ModelError
from lumen.export.merge import MergeConfig, merge
from lumen.models.load import load_model

IDS = torch.tensor([[5, 6, 7, 8, 9]])


def trained(tmp_path: Path, model: Any = None, *, dtype: torch.dtype = torch.float32, **keys: Any) -> Any:
    """base/ and adapter/ in tmp_path; returns the adapted model."""
    folder = save_tiny(tmp_path / "base", model if model is not None else tiny_llama(dtype=dtype))
    config = AdaptConfig(model_name_or_path=str(folder), lora_rank=4, **keys)
    loaded = load_model(config, dtype=dtype, device="cpu")
    adapted = adapt(loaded, config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter += 0.05 * torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
    save_adapter(adapted, tmp_path / "adapter", tokenizer=loaded.tokenizer, base=str(folder))
    return adapted.eval()


def config(tmp_path: Path, **keys: Any) -> MergeConfig:
    return MergeConfig(
        **{
            "model_name_or_path": str(tmp_path / "base"),
            "adapter_name_or_path": str(tmp_path / "adapter"),
            "export_dir": str(tmp_path / "merged"),
            **keys,
        }
    )


def plain_logits(path: Path, ids: torch.Tensor = IDS) -> torch.Tensor:
    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()(ids).logits


@pytest.mark.parametrize("keys", [{}, {"use_dora": True}, {"use_rslora": True, "lora_alpha": 5}, {"pissa_init": True}])
@pytest.mark.parametrize("tied", [True, False])
def test_plain_transformers_loads_the_directory_with_the_adapters_logits(
    tmp_path: Path, keys: dict[str, Any], tied: bool
) -> None:
    adapted = trained(tmp_path, tiny_llama(tie_word_embeddings=tied), **keys)
    result = merge(config(tmp_path))
    torch.testing.assert_close(plain_logits(tmp_path / "merged"), adapted(IDS).logits, atol=1e-5, rtol=0)
    assert result.max_difference < 1e-5 and result.kl < 1e-6 < result.kl_base
    assert len(result.report.changes) == 14 and not result.report.unchanged
    with safe_open(tmp_path / "merged" / "model.safetensors", framework="pt") as file:
        assert ("lm_head.weight" in file.keys()) != tied  # noqa: SIM118
        assert file.metadata()["format"] == "pt"
    names = {p.name for p in (tmp_path / "merged").iterdir()}
    assert {"config.json", "generation_config.json", "tokenizer.json", "chat_template.jinja", "README.md"} <= names
    assert "quantization_config" not in json.loads((tmp_path / "merged" / "config.json").read_text())
    assert len(AutoTokenizer.from_pretrained(tmp_path / "merged")) == 320


@pytest.mark.parametrize("architecture", ["gpt2", "gemma2", "phi3", "mixtral"])
def test_other_architectures(tmp_path: Path, architecture: str) -> None:
    adapted = trained(tmp_path, tiny_model(architecture))
    merge(config(tmp_path))
    torch.testing.assert_close(plain_logits(tmp_path / "merged"), adapted(IDS).logits, atol=1e-5, rtol=0)


def test_four_added_tokens_and_a_trained_tied_embedding_survive(tmp_path: Path) -> None:
    tokens = ["<a>", "<b>", "<c>", "<d>"]
    adapted = trained(tmp_path, tiny_llama(tie_word_embeddings=True), add_special_tokens=tokens, resize_vocab=True)
    merge(config(tmp_path))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "merged")
    ids = tokenizer("<a>x<d>", return_tensors="pt").input_ids
    assert ids[0, 0] == 320 and ids[0, -1] == 323
    torch.testing.assert_close(plain_logits(tmp_path / "merged", ids), adapted(ids).logits, atol=1e-5, rtol=0)


def test_bf16_is_verified_by_kl_and_shards_have_an_index(tmp_path: Path) -> None:
    trained(tmp_path, tiny_llama(dtype=torch.bfloat16, hidden_size=256, vocab_size=4096), dtype=torch.bfloat16)
    result = merge(config(tmp_path, export_size=0.001))
    assert result.dtype == "bfloat16" and 0 <= result.kl < 0.02
    index = json.loads((tmp_path / "merged" / "model.safetensors.index.json").read_text())
    shards = sorted(set(index["weight_map"].values()))
    assert len(shards) > 1 and all((tmp_path / "merged" / shard).is_file() for shard in shards)
    weight = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").model.layers[0].mlp.up_proj.weight
    assert weight.dtype == torch.bfloat16


def test_the_sum_is_fp32_and_cast_last(tmp_path: Path) -> None:
    adapted = trained(tmp_path, dtype=torch.bfloat16)
    layer = adapted.base_model.model.model.layers[0].self_attn.q_proj
    exact = layer.base_layer.weight.float() + 2 * layer.lora_B["default"].weight @ layer.lora_A["default"].weight
    merge(config(tmp_path))
    weight = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").model.layers[0].self_attn.q_proj.weight
    assert torch.equal(weight, exact.to(torch.bfloat16))


def test_an_untrained_adapter_fails_loudly_and_writes_nothing(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "base")
    settings = AdaptConfig(model_name_or_path=str(folder))
    save_adapter(adapt(load_model(settings, device="cpu"), settings), tmp_path / "adapter", base=str(folder))
    with pytest.raises(ModelError, match="identical to the base"):
        merge(config(tmp_path))
    assert not list(tmp_path.glob("merged*"))


def test_a_merge_that_answers_otherwise_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained(tmp_path)
    monkeypatch.setattr("peft.tuners.lora.layer.Linear.get_delta_weight", lambda self, name: self.weight * 0.5)
    with pytest.raises(ModelError, match="does not answer like the adapted one"):
        merge(config(tmp_path))
    assert not list(tmp_path.glob("merged*"))


def test_full_checkpoints_are_written_out_and_licences_travel(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "base")
    (folder / "LICENSE").write_text("do good")
    (folder / "README.md").write_text("---\nlicense: apache-2.0\n---\nhello")
    result = merge(config(tmp_path, adapter_name_or_path=None))
    assert torch.equal(plain_logits(tmp_path / "merged"), tiny_llama()(IDS).logits) and result.max_difference == 0
    assert (tmp_path / "merged" / "LICENSE").read_text() == "do good"
    assert 'license: "apache-2.0"' in (tmp_path / "merged" / "README.md").read_text()


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"export_dir": None}, "no directory to write to"),
        ({"export_dir": "{tmp}/base"}, "also an input"),
        ({"export_dir": "{tmp}/other"}, "not empty and holds no model"),
        ({"quant": {"recipe": "nf4"}}, "not built yet"),
    ],
)
def test_what_cannot_be_says_so(tmp_path: Path, keys: dict[str, Any], says: str) -> None:
    trained(tmp_path)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").write_text("precious")
    keys = {k: v.format(tmp=tmp_path) if isinstance(v, str) else v for k, v in keys.items()}
    with pytest.raises(ConfigError, match=says):
        merge(config(tmp_path, **keys))
    assert (tmp_path / "other" / "thesis.txt").read_text() == "precious"


def test_command_line_and_llama_factorys_merge_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trained(tmp_path)
    assert run(["merge", "--adapter", str(tmp_path / "adapter"), "--out", str(tmp_path / "one")]) == 0
    assert "verified" in capsys.readouterr().out
    (tmp_path / "merge.yaml").write_text(
        f"model_name_or_path: {tmp_path}/base\nadapter_name_or_path: {tmp_path}/adapter\ntemplate: chatml\n"
        f"trust_remote_code: true\nexport_dir: {tmp_path}/two\nexport_size: 5\nexport_device: cpu\n"
        "export_legacy_format: false\n"
    )
    assert run(["export", str(tmp_path / "merge.yaml")]) == 0
    capsys.readouterr()
    assert run(["merge", str(tmp_path / "merge.yaml"), f"export_dir={tmp_path / 'three'}", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["max_difference"] < 1e-5
    one, two = plain_logits(tmp_path / "one"), plain_logits(tmp_path / "two")
    assert torch.equal(one, two)
    assert run(["merge", "--adapter", str(tmp_path / "nowhere"), "--out", str(tmp_path / "x")]) == 2
    assert run(["merge", str(tmp_path / "merge.yaml"), "export_legacy_format=true"]) == 2
    assert run(["merge"]) == 2 and run(["merge", "--help"]) == 0
    assert "Traceback" not in capsys.readouterr().err
