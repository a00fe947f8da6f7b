"""GGUF files: read by the `gguf` package, loaded by transformers with equal weights; tokenizers round-trip."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from tests.helpers import save_tiny, shared_data, smollm2_gguf, tiny_llama, tiny_model, tiny_tokenizer
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, LlamaConfig, PreTrainedTokenizerFast

from lumen.cli.main import run
from lumen.core import ConfigError, ModelError
from lumen.export.gguf_model import permuted
from lumen.export.gguf_vocab import BYTE, CONTROL, NORMAL, UNKNOWN, UNUSED, USER_DEFINED, pre_tokenizer, vocabulary
from lumen.export.merge import MergeConfig
from lumen.export.ollama import modelfile
from lumen.export.run import export
from lumen.formats import QuantSpec, decode, encode
from lumen.models.config import ModelConfig
from lumen.models.gguf import quick_gguf
from lumen.models.load import load_model, quiet_progress

SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 64, "head_dim": 16}
MORE: dict[str, dict[str, Any]] = {
    "gemma3_text": {"query_pre_attn_scalar": 16, "tie_word_embeddings": True},
    "qwen3_moe": {"norm_topk_prob": True},
    "qwen2": {"tie_word_embeddings": True},
}
ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3", "phi3", "gemma3_text", "qwen3_moe")


def tiny(architecture: str, **more: Any) -> Any:
    """A tiny model whose norms, biases and embeddings are not all ones and zeros."""
    model = tiny_model(architecture, **{**SIZES, **MORE.get(architecture, {}), **more})
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return model


def config(tmp_path: Path, kind: str, **keys: Any) -> MergeConfig:
    return MergeConfig(
        **{
            "model_name_or_path": str(tmp_path / "base"),
            "export_dir": str(tmp_path / "out"),
            "export_format": f"gguf-{kind}",
            "export_pre_tokenizer": "gpt-2",
            "export_verify_tokens": 40,
            **keys,
        }
    )


def written(tmp_path: Path) -> tuple[Path, gguf.GGUFReader]:
    (path,) = (tmp_path / "out").glob("*.gguf")
    return path, gguf.GGUFReader(path)


def reload(path: Path, settings: Any = None) -> Any:
    arguments = {} if settings is None else {"config": settings}
    with quick_gguf(), quiet_progress():
        return AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, dtype=torch.float32,
            quantization_config=GgufConfig(dequantize=True), **arguments,
        )  # fmt: skip


def quantised(tensor: torch.Tensor, kind: str) -> torch.Tensor:
    spec = QuantSpec.parse(kind)
    codes, scales = encode(tensor, spec)
    return decode(codes, scales, spec, tensor.shape)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("kind", ["f16", "q8_0"])
def test_transformers_finds_equal_weights(tmp_path: Path, architecture: str, kind: str) -> None:
    model = tiny(architecture)
    save_tiny(tmp_path / "base", model)
    result = export(config(tmp_path, kind))
    assert result.verification is not None and result.verification.kl < 1e-3
    path, reader = written(tmp_path)
    # The file's own keys describe the model, but a mistral is a llama there, and transformers reads neither the size of
    # qwen3's heads nor that of experts, nor gemma3's attention scale, which llama.cpp derives.
    settings = {
        "mistral": LlamaConfig.from_dict({**model.config.to_dict(), "model_type": "llama"}),
        "gemma3_text": model.config,
        "qwen3": model.config,
        "qwen3_moe": model.config,
    }
    again = reload(path, settings.get(architecture))
    norms = {n for n, m in again.named_modules() if "Norm" in type(m).__name__}
    types = {tensor.name: tensor.tensor_type.name for tensor in reader.tensors}
    assert set(types.values()) == {"F32", kind.upper()}
    found, want = again.state_dict(), model.state_dict()
    assert found.keys() == want.keys()
    for name, tensor in want.items():
        got, module = found[name], name.rpartition(".")[0]
        if tensor.ndim == 1 or module in norms or name.endswith("mlp.gate.weight"):
            shift = architecture == "gemma3_text"  # 1 + w - 1 rounds once in fp32
            torch.testing.assert_close(got, tensor, rtol=0, atol=2e-7 if shift else 0)
        elif kind == "f16":
            assert torch.equal(got, tensor.half().float()), name
        else:
            assert torch.equal(got, quantised(tensor, kind)), name
    ids = torch.tensor([[5, 6, 7, 8, 9]])
    with torch.no_grad():
        torch.testing.assert_close(again(ids).logits, model(ids).logits, atol=0.2 if kind == "q8_0" else 0.02, rtol=0)


def test_q4_0_keeps_embedding_and_output_in_q8_0_and_uneven_rows_fall_back(tmp_path: Path) -> None:
    model = tiny("llama", intermediate_size=80)
    save_tiny(tmp_path / "base", model)
    result = export(config(tmp_path, "q4_0"))
    path, reader = written(tmp_path)
    types = {tensor.name: tensor.tensor_type.name for tensor in reader.tensors}
    assert types["token_embd.weight"] == types["output.weight"] == "Q8_0"
    assert types["blk.0.attn_q.weight"] == "Q4_0" and types["blk.1.ffn_down.weight"] == "F16"
    assert result.details["rows that are no multiple of a block"] == 2
    again = reload(path)
    weight = model.model.layers[1].self_attn.o_proj.weight
    assert torch.equal(again.model.layers[1].self_attn.o_proj.weight, quantised(weight, "q4_0"))


def test_bf16_is_exact_and_the_experts_of_mixtral_are_stacked(tmp_path: Path) -> None:
    model = tiny("mixtral").to(torch.bfloat16)
    save_tiny(tmp_path / "base", model)
    with pytest.raises(ConfigError, match="cannot be verified"):
        export(config(tmp_path, "bf16"))
    assert not list(tmp_path.glob("out*"))
    export(config(tmp_path, "bf16", export_verify=False))
    _, reader = written(tmp_path)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    stacked = tensors["blk.1.ffn_up_exps.weight"]
    assert list(stacked.shape) == [64, 128, 4] and stacked.tensor_type.name == "BF16"
    bits = torch.from_numpy(stacked.data.copy()).view(torch.int16).view(torch.bfloat16)
    assert torch.equal(bits.reshape(4, 128, 64), model.model.layers[1].mlp.experts.gate_up_proj[:, 128:])
    assert tensors["blk.0.ffn_gate_inp.weight"].tensor_type.name == "F32"
    fields = {name: field.contents() for name, field in reader.fields.items()}
    assert fields["llama.expert_count"] == 4 and fields["llama.expert_used_count"] == 2


def test_keys_tell_llama_cpp_what_the_config_says(tmp_path: Path) -> None:
    rope = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 256}  # fmt: skip
    model = tiny_llama(**SIZES, vocab_size=330, rope_parameters=rope, rms_norm_eps=1e-5)
    (save_tiny(tmp_path / "base", model) / "LICENSE").write_text("free")
    (tmp_path / "base" / "README.md").write_text("---\nlicense: mit\n---\n")
    export(config(tmp_path, "q8_0"))
    _, reader = written(tmp_path)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    expected = {
        "general.architecture": "llama", "general.type": "model", "general.license": "mit", "general.file_type": 7,
        "general.quantization_version": 2, "llama.block_count": 2, "llama.context_length": 512,
        "llama.embedding_length": 64, "llama.feed_forward_length": 128, "llama.attention.head_count": 4,
        "llama.attention.head_count_kv": 2, "llama.vocab_size": 330, "llama.rope.dimension_count": 16,
        "llama.rope.freq_base": 500000.0, "llama.attention.key_length": 16, "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2", "tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.padding_token_id": 3,
        "tokenizer.ggml.add_bos_token": False, "tokenizer.chat_template": tiny_tokenizer().chat_template,
    }  # fmt: skip
    assert {key: fields.get(key) for key in expected} == expected
    assert fields["llama.attention.layer_norm_rms_epsilon"] == pytest.approx(1e-5)
    assert reader.fields["GGUF.version"].contents() == 3 and reader.alignment == 32
    types, tokens = fields["tokenizer.ggml.token_type"], fields["tokenizer.ggml.tokens"]
    assert len(types) == len(tokens) == 330
    assert types[:5] == [CONTROL, CONTROL, CONTROL, CONTROL, NORMAL] and tokens[1] == "<|im_start|>"
    assert types[-1] == UNUSED and tokens[-1] == "[PAD329]"
    factors = next(t for t in reader.tensors if t.name == "rope_freqs.weight").data
    base = 500000.0 ** (-np.arange(0, 16, 2) / 16)
    wavelength = 2 * np.pi / base
    assert factors[wavelength < 256 / 4].tolist() == [1.0] * int((wavelength < 64).sum())
    np.testing.assert_allclose(factors[wavelength > 256], 8.0, rtol=1e-6)
    assert {p.name for p in (tmp_path / "out").iterdir()} >= {"Modelfile", "README.md", "LICENSE", "export.json"}


def test_rows_are_permuted_so_that_neighbours_rotate_together() -> None:
    rows = torch.arange(8).unsqueeze(1).repeat(1, 3)
    assert permuted(rows, 2)[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


def test_an_unknown_pre_tokenizer_raises_by_name(tmp_path: Path) -> None:
    save_tiny(tmp_path / "base")
    with pytest.raises(ModelError, match="pre-tokenizer is not known") as error:
        export(config(tmp_path, "f16", export_pre_tokenizer=None))
    assert "export_pre_tokenizer" in str(error.value) and not list(tmp_path.glob("out*"))


@pytest.mark.parametrize(
    ("architecture", "more", "says"),
    [
        ("gemma2", {"query_pre_attn_scalar": 16}, "gemma2 is not built"),
        ("qwen3_moe", {"norm_topk_prob": False}, "norm_topk_prob"),
        ("gemma3_text", {"query_pre_attn_scalar": 8}, "query_pre_attn_scalar"),
    ],
)
def test_what_llama_cpp_would_compute_otherwise_is_refused(
    tmp_path: Path, architecture: str, more: dict[str, Any], says: str
) -> None:
    save_tiny(tmp_path / "base", tiny_model(architecture, **{**SIZES, **more}))
    with pytest.raises(ModelError, match=says):
        export(config(tmp_path, "f16", export_verify=False))
    assert not list(tmp_path.glob("out*"))


def sentencepiece_tokenizer() -> PreTrainedTokenizerFast:
    """The form in which llama 2, mistral and gemma tokenizers come: BPE over ▁ with bytes to fall back on."""
    words = ["▁the", "▁cat", "▁sat", "▁on", "▁mat", "▁then", "s"]
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"<0x{b:02X}>": 3 + b for b in range(256)}
    merges: list[tuple[str, str]] = []
    for pair in [("▁", "t"), ("▁t", "h"), ("▁th", "e"), ("▁", "c"), ("a", "t"), ("▁c", "at"), ("▁", "s"), ("▁s", "at"),
                 ("▁", "o"), ("▁o", "n"), ("▁", "m"), ("▁m", "at"), ("▁the", "n")]:  # fmt: skip
        merges.append(pair)
        vocab.setdefault(pair[0] + pair[1], len(vocab))
    for letter in sorted({c for word in words for c in word}):
        vocab.setdefault(letter, len(vocab))
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    tokenizer.add_tokens(["<tool>"])
    return tokenizer


def test_sentencepiece_scores_give_the_same_tokens_back(tmp_path: Path) -> None:
    tokenizer = sentencepiece_tokenizer()
    model = tiny_llama(**SIZES, vocab_size=len(tokenizer), bos_token_id=1, eos_token_id=2, pad_token_id=0)
    save_tiny(tmp_path / "base", model, tokenizer)
    export(config(tmp_path, "f16", export_pre_tokenizer=None, export_verify_tokens=20))
    path, reader = written(tmp_path)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    assert fields["tokenizer.ggml.model"] == "llama" and fields["tokenizer.ggml.pre"] == "default"
    assert fields["tokenizer.ggml.add_space_prefix"] is True
    types = fields["tokenizer.ggml.token_type"]
    assert types[:4] == [UNKNOWN, CONTROL, CONTROL, BYTE] and types[-1] == USER_DEFINED
    scores = dict(zip(fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.scores"], strict=True))
    assert scores["▁t"] == 0 > scores["▁th"] > scores["▁the"] > scores["▁then"]
    again = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    for text in ("the cat sat on the mat", "then the mats", "the 猫 sat"):
        assert again(text, add_special_tokens=False).input_ids == tokenizer(text).input_ids, text


def test_smollm2s_tokenizer_is_recognised_and_round_trips() -> None:
    path = smollm2_gguf()
    with quick_gguf():
        tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    assert pre_tokenizer(tokenizer) == "smollm"
    source = {name: field.contents() for name, field in gguf.GGUFReader(path).fields.items()}
    found = vocabulary(tokenizer, 49152, end_ids={2})
    assert found.tokens == source["tokenizer.ggml.tokens"] and found.types == source["tokenizer.ggml.token_type"]
    assert found.merges == source["tokenizer.ggml.merges"] and found.pre == source["tokenizer.ggml.pre"]
    assert found.chat_template == source["tokenizer.chat_template"]


def test_tokens_of_real_text_survive_the_file(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    save_tiny(tmp_path / "base", tiny_llama(**SIZES))
    export(config(tmp_path, "f16", export_verify=False))
    path, _ = written(tmp_path)
    again = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    rows = json.loads(shared_data("alpaca_zh_demo.json").read_text())[:30]
    for row in rows:
        text = tokenizer.apply_chat_template([{"role": "user", "content": row["instruction"]}], tokenize=False)
        assert again(text).input_ids == tokenizer(text).input_ids
    assert again.chat_template == tokenizer.chat_template


def test_the_modelfile_has_a_template_only_where_it_renders_the_same(tmp_path: Path) -> None:
    for name, template in {"one": None, "two": "{% for m in messages %}~{{ m['content'] }}{% endfor %}"}.items():
        tokenizer = tiny_tokenizer()
        if template:
            tokenizer.chat_template = template
        save_tiny(tmp_path / f"base-{name}", tiny_llama(**SIZES), tokenizer)
        keys = {"model_name_or_path": str(tmp_path / f"base-{name}"), "export_dir": str(tmp_path / name)}
        export(config(tmp_path, "q8_0", export_verify=False, **keys))
    one, two = ((tmp_path / name / "Modelfile").read_text() for name in ("one", "two"))
    assert one.startswith("FROM ./base-one-Q8_0.gguf\n") and 'PARAMETER stop "<|im_end|>"' in one
    assert "<|im_start|>user\n{{ .Prompt }}<|im_end|>\n{{ end }}<|im_start|>assistant\n{{ .Response }}" in one
    assert "TEMPLATE" not in two.replace("add TEMPLATE by hand", "") and "#" in two


def test_a_system_message_that_the_template_adds_itself_is_kept() -> None:
    path = smollm2_gguf()
    with quick_gguf():
        tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    text, form = modelfile("a.gguf", tokenizer, "apache-2.0")
    assert form == "chatml" and 'SYSTEM """You are a helpful AI assistant named SmolLM' in text
    tokenizer.chat_template = "{{ 'Be good.' }}" + tokenizer.chat_template
    assert modelfile("a.gguf", tokenizer, None)[1] is None


def test_the_file_trains_on_as_any_model_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_tiny(tmp_path / "base", tiny_llama(**SIZES))
    words = ["export", "--model", str(tmp_path / "base"), "--out", str(tmp_path / "out"), "--format", "Q8_0"]
    assert run([*words, "export_pre_tokenizer=gpt-2", "export_verify_tokens=40"]) == 0
    printed = capsys.readouterr().out
    assert "llama-server -m" in printed and "ollama create" in printed and "mean KL" in printed
    loaded = load_model(ModelConfig(model_name_or_path=str(written(tmp_path)[0])), dtype=torch.float32, device="cpu")
    assert len(loaded.tokenizer) == 320 and loaded.model.config.num_hidden_layers == 2


def test_k_quants_name_their_extra_where_it_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tiny(tmp_path / "base", tiny_llama(**SIZES))
    monkeypatch.setattr("lumen.export.gguf_kquants.importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="libgguf") as error:
        export(config(tmp_path, "q4_k_m", export_verify=False))
    assert "kquants" in str(error.value) and not list(tmp_path.glob("out*"))


def test_k_quants_are_what_libgguf_makes(tmp_path: Path) -> None:
    libgguf = pytest.importorskip("libgguf")
    model = tiny("llama", hidden_size=256, intermediate_size=512, num_hidden_layers=8)
    save_tiny(tmp_path / "base", model)
    export(config(tmp_path, "q4_k_m"))
    path, reader = written(tmp_path)
    types = {tensor.name: tensor.tensor_type.name for tensor in reader.tensors}
    assert types["token_embd.weight"] == "Q6_K" and types["blk.3.attn_q.weight"] == "Q4_K"
    assert [i for i in range(8) if types[f"blk.{i}.ffn_down.weight"] == "Q6_K"] == [0, 3, 6, 7]
    weight = model.model.layers[3].mlp.up_proj.weight.detach().numpy()
    want = gguf.dequantize(
        libgguf.quantize_rows(weight, int(gguf.GGMLQuantizationType.Q4_K)), gguf.GGMLQuantizationType.Q4_K
    )
    assert np.array_equal(reload(path).model.layers[3].mlp.up_proj.weight.detach().numpy(), want)
