"""compressed-tensors exports: transformers finds exactly our dequantised weights; limits and mistakes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers import save_tiny, tiny_llama, tiny_model
from transformers import AutoModelForCausalLM

from lumen.adapters.adapt import AdaptConfig, adapt
from lumen.adapters.save import save_adapter
from lumen.cli.main import run
from lumen.core import ConfigError, ModelError
from lumen.export.compressed import SCHEMES, dequantised
from lumen.export.merge import MergeConfig
from lumen.export.run import export
from lumen.export.stage import Weights
from lumen.formats import QuantSpec, encode
from lumen.models.config import ModelConfig
from lumen.models.load import load_model, quiet_progress

compressed_tensors = pytest.importorskip("compressed_tensors")

SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 64}
TOKENS = 48
IDS = torch.tensor([[5, 6, 7, 8, 9, 10]])


def config(tmp_path: Path, name: str, **keys: Any) -> MergeConfig:
    return MergeConfig(
        **{
            "model_name_or_path": str(tmp_path / "base"),
            "export_dir": str(tmp_path / "out"),
            "export_format": name,
            "export_verify_tokens": TOKENS,
            **keys,
        }
    )


def plain(folder: Path) -> Any:
    """The export as transformers unpacks it into ordinary layers."""
    from transformers import CompressedTensorsConfig

    with quiet_progress():
        return AutoModelForCausalLM.from_pretrained(
            folder, quantization_config=CompressedTensorsConfig(dequantize=True)
        )


def quantization(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())["quantization_config"]


def check_exact(tmp_path: Path, name: str, dtype: torch.dtype) -> int:
    """Every quantised weight that has a module of its own equals ours bit for bit; returns how many."""
    source, scheme = Weights.open(tmp_path / "base"), SCHEMES[name]
    group = quantization(tmp_path / "out")["config_groups"]["group_0"]["weights"].get("group_size")
    found, count = plain(tmp_path / "out").state_dict(), 0
    for weight, got in found.items():
        if weight.endswith("_proj.weight") and "experts" not in weight:
            want = dequantised(source.get(weight), weight, scheme, dtype, group)
            assert torch.equal(got, want) and got.dtype == dtype, weight
            assert not torch.equal(got, source.get(weight)), "nothing was quantised"
            count += 1
        elif weight in source.files:
            assert torch.equal(got, source.get(weight)), weight
    return count


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("fp8", torch.bfloat16), ("fp8", torch.float32), ("fp8-static", torch.bfloat16), ("int8", torch.bfloat16),
        ("int8", torch.float32), ("w8a16", torch.bfloat16), ("int4", torch.bfloat16), ("int4", torch.float16),
    ],
)  # fmt: skip
def test_transformers_finds_exactly_our_weights(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    save_tiny(tmp_path / "base", tiny_llama(dtype=dtype, tie_word_embeddings=name == "int8", **SIZES))
    result = export(config(tmp_path, name))
    assert check_exact(tmp_path, name, dtype) == result.quantised == 14
    assert result.verification is not None and 0 < result.verification.kl < 1e-3
    entry = quantization(tmp_path / "out")
    group = entry["config_groups"]["group_0"]
    assert entry["quant_method"] == "compressed-tensors" and entry["format"] == SCHEMES[name].format
    assert entry["quantization_status"] == "compressed" and "lm_head" in entry["ignore"]
    assert group["targets"] == ["Linear"] and group["weights"]["symmetric"] and not group["weights"]["dynamic"]
    files = {p.name for p in (tmp_path / "out").iterdir()}
    assert {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "README.md"} <= files
    report = json.loads((tmp_path / "out" / "export.json").read_text())
    assert report["verification"]["kl"] == result.verification.kl and report["bits_per_weight"] > 4


def test_stored_tensors_have_the_documented_form(tmp_path: Path) -> None:
    save_tiny(tmp_path / "base", tiny_llama(dtype=torch.bfloat16, **SIZES))
    forms = {}
    for name in SCHEMES:
        export(config(tmp_path, name, export_dir=str(tmp_path / name), export_verify=False))
        stored = Weights.open(tmp_path / name)
        layer = "model.layers.0.self_attn.k_proj."
        forms[name] = {
            key.removeprefix(layer): (stored.dtypes[key], stored.shapes[key])
            for key in stored.files
            if key.startswith(layer)
        }
    assert forms["fp8"] == {"weight": ("F8_E4M3", (16, 64)), "weight_scale": ("BF16", (16, 1))}
    assert forms["fp8-static"] == {**forms["fp8"], "input_scale": ("BF16", (1,))}
    assert forms["int8"] == {"weight": ("I8", (16, 64)), "weight_scale": ("BF16", (16, 1))}
    shape = {"weight_shape": ("I64", (2,))}
    assert forms["w8a16"] == {"weight_packed": ("I32", (16, 16)), "weight_scale": ("BF16", (16, 1)), **shape}
    assert forms["int4"] == {"weight_packed": ("I32", (16, 8)), "weight_scale": ("BF16", (16, 2)), **shape}
    word = Weights.open(tmp_path / "int4").get("model.layers.0.self_attn.k_proj.weight_packed")[0, 0].item()
    source = Weights.open(tmp_path / "base").get("model.layers.0.self_attn.k_proj.weight")
    scale = Weights.open(tmp_path / "int4").get("model.layers.0.self_attn.k_proj.weight_scale")[0, 0].float()
    codes = (source[0, :8].float() / scale).round().int() + 8
    assert [(word >> 4 * i) & 15 for i in range(8)] == codes.tolist()


@pytest.mark.parametrize("name", ["fp8", "w8a16", "int4"])
def test_a_mixture_of_experts(tmp_path: Path, name: str) -> None:
    save_tiny(tmp_path / "base", tiny_model("qwen3_moe", dtype=torch.bfloat16, **SIZES))
    result = export(config(tmp_path, name))
    assert result.quantised == 8 + 2 * 4 * 3 and check_exact(tmp_path, name, torch.bfloat16) == 8
    assert "model.layers.0.mlp.gate" in quantization(tmp_path / "out")["ignore"]
    experts = plain(tmp_path / "out").model.layers[1].mlp.experts
    source = Weights.open(tmp_path / "base")
    key = "model.layers.1.mlp.experts.2.down_proj.weight"
    group = quantization(tmp_path / "out")["config_groups"]["group_0"]["weights"].get("group_size")
    want = dequantised(source.get(key), key, SCHEMES[name], torch.bfloat16, group)
    assert torch.equal(experts.down_proj[2], want)


def test_int8_experts_are_refused_because_nothing_here_can_verify_them(tmp_path: Path) -> None:
    save_tiny(tmp_path / "base", tiny_model("mixtral", **SIZES))
    with pytest.raises(ConfigError, match="W8A8 experts"):
        export(config(tmp_path, "int8"))
    assert not list(tmp_path.glob("out*"))
    export(config(tmp_path, "int8", export_verify=False))
    key = "model.layers.0.block_sparse_moe.experts.0.w1.weight"
    assert Weights.open(tmp_path / "out").dtypes[key] == "I8"


def test_the_adapter_is_merged_in_fp32_and_then_quantised(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "base", tiny_llama(dtype=torch.bfloat16, **SIZES))
    settings = AdaptConfig(model_name_or_path=str(folder), lora_rank=4)
    loaded = load_model(settings, device="cpu")
    adapted = adapt(loaded, settings)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    save_adapter(adapted, tmp_path / "adapter", tokenizer=loaded.tokenizer, base=str(folder))
    layer = adapted.base_model.model.model.layers[0].self_attn.q_proj
    exact = layer.base_layer.weight.float() + 2 * layer.lora_B["default"].weight @ layer.lora_A["default"].weight
    result = export(config(tmp_path, "int8", adapter_name_or_path=str(tmp_path / "adapter")))
    codes, scales = encode(exact.detach(), QuantSpec.parse("int8:row"), scale_dtype=torch.bfloat16)
    stored = Weights.open(tmp_path / "out")
    key = "model.layers.0.self_attn.q_proj.weight"
    assert torch.equal(stored.get(key), codes) and torch.equal(stored.get(key + "_scale"), scales["scale"])
    rounded, _ = encode(exact.detach().bfloat16(), QuantSpec.parse("int8:row"), scale_dtype=torch.bfloat16)
    assert not torch.equal(codes, rounded), "the test could not tell a bf16 sum"
    assert result.verification is not None and result.verification.kl < 1e-3
    assert result.dtype == "bfloat16" and stored.dtypes["model.norm.weight"] == "BF16"


def test_activations_are_quantised_when_transformers_runs_it(tmp_path: Path) -> None:
    save_tiny(tmp_path / "base", tiny_llama(**SIZES))
    logits = {}
    for name in ("int8", "w8a16"):
        export(config(tmp_path, name, export_dir=str(tmp_path / name)))
        with quiet_progress(), torch.no_grad():
            logits[name] = AutoModelForCausalLM.from_pretrained(tmp_path / name)(IDS).logits
    torch.testing.assert_close(logits["int8"], logits["w8a16"], atol=5e-3, rtol=0)
    assert not torch.equal(logits["int8"], logits["w8a16"])


@pytest.mark.parametrize(("name", "close"), [("w8a16", 1e-6), ("int4", 1e-6), ("fp8", 1e-6), ("int8", 0.02)])
def test_lumen_loads_its_own_exports_as_codes(tmp_path: Path, name: str, close: float) -> None:
    """int8: compressed-tensors scales a token by its largest magnitude / 127.5, ours by / 127."""
    save_tiny(tmp_path / "base", tiny_llama(**SIZES))
    export(config(tmp_path, name))
    ours = load_model(ModelConfig(model_name_or_path=str(tmp_path / "out")), dtype=torch.float32, device="cpu").model
    assert type(ours.model.layers[0].mlp.up_proj).__name__ == "QuantLinear"
    with quiet_progress(), torch.no_grad():
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
        torch.testing.assert_close(ours(IDS).logits, theirs(IDS).logits, atol=close, rtol=0)


def test_shards_and_their_index(tmp_path: Path) -> None:
    save_tiny(tmp_path / "base", tiny_llama(**SIZES))
    export(config(tmp_path, "fp8", export_size=0.0001))
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    names = sorted(set(index["weight_map"].values()))
    assert len(names) > 1 and names[0] == f"model-00001-of-{len(names):05d}.safetensors"
    assert check_exact(tmp_path, "fp8", torch.float32) == 14


def test_above_the_limit_nothing_appears(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_tiny(tmp_path / "base", tiny_llama(**SIZES))
    with pytest.raises(ModelError, match="mean KL"):
        export(config(tmp_path, "int4", export_max_kl=1e-9))
    assert {p.name for p in tmp_path.iterdir()} == {"base"}
    words = ["export", "--model", str(tmp_path / "base"), "--out", str(tmp_path / "out"), "--format", "W4A16"]
    assert run([*words, "export_max_kl=0", f"export_verify_tokens={TOKENS}"]) == 2
    assert {p.name for p in tmp_path.iterdir()} == {"base"}
    assert run([*words, "--json", f"export_verify_tokens={TOKENS}"]) == 0
    printed = capsys.readouterr().out
    assert json.loads(printed)["format"] == "int4" and (tmp_path / "out" / "config.json").is_file()


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"export_group_size": 256}, "divide no layer"),
        ({"export_dir": "{tmp}/run"}, "is a run"),
        ({"export_dir": "{tmp}/base"}, "also an input"),
        ({"export_verify_data": "{tmp}/none.txt"}, "cannot be read"),
    ],
)
def test_mistakes(tmp_path: Path, keys: dict[str, Any], says: str) -> None:
    save_tiny(tmp_path / "base", tiny_llama(**SIZES))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text("precious")
    keys = {k: v.format(tmp=tmp_path) if isinstance(v, str) else v for k, v in keys.items()}
    with pytest.raises(ConfigError, match=says):
        export(config(tmp_path, "int4", **keys))
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == "precious" and not list(tmp_path.glob("out*"))


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("fp8", {"export_group_size": 32}),
        ("int8", {"export_calibration_data": "rows.jsonl"}),
        ("hf", {"export_pre_tokenizer": "qwen2"}),
    ],
)
def test_a_key_that_the_format_would_ignore_is_refused(tmp_path: Path, name: str, keys: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="has no meaning"):
        export(config(tmp_path, name, **keys))


def test_merge_does_not_ignore_a_format(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_tiny(tmp_path / "base")
    words = ["--model", str(tmp_path / "base"), "--out", str(tmp_path / "out"), "export_format=int8"]
    assert run(["merge", *words]) == 2 and "lumen export" in capsys.readouterr().err
    assert not list(tmp_path.glob("out*"))


def test_a_quantised_source_is_refused(tmp_path: Path) -> None:
    save_tiny(tmp_path / "base", tiny_llama(**SIZES))
    export(config(tmp_path, "int8", export_verify=False))
    with pytest.raises(ModelError, match="quantised already"):
        export(config(tmp_path, "fp8", model_name_or_path=str(tmp_path / "out"), export_dir=str(tmp_path / "two")))
