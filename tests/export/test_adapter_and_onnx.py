"""Adapters as vLLM takes them, and ONNX graphs that onnxruntime answers like torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from tests.helpers import save_tiny, tiny_llama, tiny_model
from transformers import AutoModelForCausalLM

from lumen.cli.main import run
from lumen.core import ConfigError, ModelError
from lumen.export.adapter import check_for_vllm
from lumen.export.merge import MergeConfig
from lumen.export.run import export


def adapter(tmp_path: Path, **keys: Any) -> Path:
    """PEFT's own adapter with trained values, on base/."""
    base = save_tiny(tmp_path / "base")
    settings = LoraConfig(**{"r": 4, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM", **keys})
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), settings)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter += 0.1
    model.peft_config["default"].base_model_name_or_path = str(base)
    model.save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter"


def config(tmp_path: Path, name: str = "adapter", **keys: Any) -> MergeConfig:
    return MergeConfig(
        **{
            "adapter_name_or_path": str(tmp_path / "adapter"),
            "export_dir": str(tmp_path / "out"),
            "export_format": name,
            "export_verify_tokens": 40,
            **keys,
        }
    )


@pytest.mark.parametrize(("rank", "limit"), [(1, 1), (4, 8), (16, 16), (300, 320)])
def test_the_rank_decides_vllms_option(tmp_path: Path, rank: int, limit: int) -> None:
    assert check_for_vllm(adapter(tmp_path, r=rank)) == limit


def test_rank_patterns_count(tmp_path: Path) -> None:
    assert check_for_vllm(adapter(tmp_path, rank_pattern={"q_proj": 40}, alpha_pattern={"q_proj": 80})) == 64


def test_the_adapter_is_written_whole_and_verified(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = adapter(tmp_path, use_rslora=True)
    words = ["export", "--adapter", str(source), "--out", str(tmp_path / "out"), "--format", "adapter"]
    assert run([*words, "export_verify_tokens=40"]) == 0
    printed = capsys.readouterr().out
    assert "--max-lora-rank 8" in printed and "--enable-lora" in printed
    ours, theirs = (load_file(folder / "adapter_model.safetensors") for folder in (tmp_path / "out", source))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[k], theirs[k]) for k in ours)
    report = json.loads((tmp_path / "out" / "export.json").read_text())
    assert report["verification"]["kl"] == 0 and report["details"]["vLLM"].endswith("--max-lora-rank 8")
    assert {"adapter_config.json", "tokenizer.json", "README.md"} <= {p.name for p in (tmp_path / "out").iterdir()}


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"use_dora": True}, "DoRA"),
        ({"lora_bias": True}, "biases"),
        ({"bias": "lora_only"}, "biases"),
        ({"modules_to_save": ["lm_head"]}, "trained whole"),
        ({"init_lora_weights": "pissa"}, "changed base"),
        ({"init_lora_weights": "olora"}, "changed base"),
        ({"layer_replication": [(0, 2), (1, 2)]}, "replicates"),
        ({"r": 513}, "rank 513"),
    ],
)
def test_what_vllm_refuses_is_refused_before_anything_is_written(
    tmp_path: Path, keys: dict[str, Any], says: str
) -> None:
    adapter(tmp_path, **keys)
    with pytest.raises(ModelError, match=says):
        export(config(tmp_path))
    assert not list(tmp_path.glob("out*"))


def test_one_adapter_is_needed(tmp_path: Path) -> None:
    source = adapter(tmp_path)
    with pytest.raises(ConfigError, match="needs one adapter"):
        export(config(tmp_path, adapter_name_or_path=[str(source), str(source)]))


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_onnxruntime_answers_like_torch(tmp_path: Path, architecture: str) -> None:
    pytest.importorskip("onnxscript")
    onnxruntime = pytest.importorskip("onnxruntime")
    model = tiny_model(architecture)
    save_tiny(tmp_path / "base", model)
    keys = {"adapter_name_or_path": None, "model_name_or_path": str(tmp_path / "base")}
    result = export(config(tmp_path, "onnx", **keys))
    assert result.verification is not None and result.verification.kl < 1e-6
    session = onnxruntime.InferenceSession(str(tmp_path / "out" / "model.onnx"))
    ids = torch.randint(0, 320, (2, 19), generator=torch.Generator().manual_seed(5))
    (logits,) = session.run(None, {"input_ids": ids.numpy()})
    with torch.no_grad():
        torch.testing.assert_close(torch.from_numpy(logits), model(ids).logits, atol=1e-4, rtol=0)


def test_onnx_names_its_extra_where_it_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tiny(tmp_path / "base", tiny_llama())
    monkeypatch.setattr("lumen.export.onnx.importlib.util.find_spec", lambda name: None)
    keys = {"adapter_name_or_path": None, "model_name_or_path": str(tmp_path / "base")}
    with pytest.raises(ConfigError, match="onnxscript") as error:
        export(config(tmp_path, "onnx", **keys))
    assert "lumen-train[onnx]" in str(error.value)
