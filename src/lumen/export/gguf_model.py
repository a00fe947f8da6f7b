"""What a Hugging Face model is called and how it is laid out in GGUF: architectures, keys, tensors.

Names of tensors come from the `gguf` package's own table.  What the table cannot say:

    llama, mistral, mixtral   q and k rows are permuted: Hugging Face rotates the two halves of a head, llama.cpp pairs
                              of neighbours, so row (half, i) of a head becomes row (i, half)
    gemma3                    RMSNorm multiplies by 1 + w; the file holds 1 + w
    mixture of experts        the experts' matrices of a layer become one tensor [experts, out, in]
    rope scaling              llama3's and longrope's factors are tensors, others are keys

A setting that llama.cpp hard-codes otherwise (qwen3moe without normalised routing, gemma3 with another pattern of
sliding windows) is refused: the file would load and answer wrongly.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from lumen.core import ModelError, note
from lumen.export.stage import Weights

ARCHITECTURES = {
    "llama": "llama", "mistral": "llama", "mixtral": "llama", "qwen2": "qwen2", "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe", "gemma3_text": "gemma3", "phi3": "phi3",
}  # fmt: skip
"""transformers' model_type → GGUF's architecture."""

_EXPERT = re.compile(
    r"^(?P<layer>.*\.layers\.(\d+)\.(?:mlp|block_sparse_moe))\.experts\.(?P<number>\d+)\.(?P<name>\w+)\.weight$"
)
_EXPERT_NAMES = {"w1": "gate", "w2": "down", "w3": "up", "gate_proj": "gate", "down_proj": "down", "up_proj": "up"}


@dataclass(frozen=True)
class Plan:
    """One tensor of the file.  read: gives it in its source's dtype, shape [..., K]."""

    name: str
    shape: tuple[int, ...]
    read: Callable[[], torch.Tensor]

    @property
    def is_matrix(self) -> bool:
        """Whether its values may be fewer than 32 bits: not norms, biases, routers and rope factors."""
        plain = self.name.removesuffix(".weight")
        return len(self.shape) > 1 and self.name.endswith(".weight") and not plain.endswith(("_norm", "ffn_gate_inp"))


def architecture(settings: Any) -> str:
    """GGUF's name.  Raises ModelError for one that is not written."""
    name = ARCHITECTURES.get(settings.model_type)
    if name is None:
        raise ModelError(
            f"GGUF export of {settings.model_type} is not built",
            where="export_format",
            fix=f"built: {', '.join(sorted(ARCHITECTURES))}; other formats have no such limit",
        )
    return name


def head_dim(settings: Any) -> int:
    """Values of an attention head."""
    return int(getattr(settings, "head_dim", None) or settings.hidden_size // settings.num_attention_heads)


def keys(settings: Any) -> dict[str, Any]:
    """Keys of the architecture, without its name in front; floats are float32, whole numbers uint32 in the file."""
    arch = architecture(settings)
    _refuse(settings, arch)
    dim = head_dim(settings)
    found: dict[str, Any] = {
        "block_count": settings.num_hidden_layers,
        "context_length": settings.max_position_embeddings,
        "embedding_length": settings.hidden_size,
        "feed_forward_length": settings.intermediate_size,
        "attention.head_count": settings.num_attention_heads,
        "attention.head_count_kv": settings.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": float(settings.rms_norm_eps),
        "vocab_size": settings.vocab_size,
    }
    if arch == "llama":
        found["rope.dimension_count"] = dim
    elif arch == "phi3":
        rope, _ = rope_parameters(settings)
        found["rope.dimension_count"] = int(dim * (rope.get("partial_rotary_factor") or 1.0))
        found["attention.sliding_window"] = int(getattr(settings, "sliding_window", None) or 0)
    if arch == "gemma3" and settings.sliding_window:
        found["attention.sliding_window"] = int(settings.sliding_window)
    if getattr(settings, "head_dim", None):
        found |= {"attention.key_length": dim, "attention.value_length": dim}
    if getattr(settings, "final_logit_softcapping", None):
        found["final_logit_softcapping"] = float(settings.final_logit_softcapping)
    experts = getattr(settings, "num_local_experts", None) or getattr(settings, "num_experts", None)
    if experts and settings.model_type in ("mixtral", "qwen3_moe"):
        found |= {"expert_count": int(experts), "expert_used_count": int(settings.num_experts_per_tok)}
        if arch == "qwen3moe":
            found["expert_feed_forward_length"] = int(settings.moe_intermediate_size)
    return found | _rope_keys(settings)


def rope_parameters(settings: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Rotary settings of full attention, and of sliding windows where they differ."""
    rope = dict(getattr(settings, "rope_parameters", None) or {})
    if "full_attention" in rope:
        return dict(rope["full_attention"] or {}), dict(rope.get("sliding_attention") or {})
    return rope, {}


def _rope_keys(settings: Any) -> dict[str, Any]:
    rope, sliding = rope_parameters(settings)
    kind = str(rope.get("rope_type") or "default")
    found: dict[str, Any] = {}
    if rope.get("rope_theta"):
        found["rope.freq_base"] = float(rope["rope_theta"])
    if sliding.get("rope_theta"):
        found["rope.freq_base_swa"] = float(sliding["rope_theta"])
    if kind in ("linear", "yarn"):
        found |= {"rope.scaling.type": kind, "rope.scaling.factor": float(rope["factor"])}
    original = rope.get("original_max_position_embeddings")
    if original is None:
        original = getattr(settings, "original_max_position_embeddings", None)
    if kind == "yarn" and original:
        found["rope.scaling.original_context_length"] = int(original)
    if settings.model_type == "phi3":
        original = int(original or settings.max_position_embeddings)
        found["rope.scaling.original_context_length"] = original
        if kind == "longrope":
            scale = settings.max_position_embeddings / original
            factor = math.sqrt(1 + math.log(scale) / math.log(original)) if scale > 1 else 1.0
            found["rope.scaling.attn_factor"] = float(rope.get("attention_factor") or factor)
    if kind not in ("default", "linear", "yarn", "llama3", "longrope"):
        raise ModelError(f"rope scaling {kind!r} has no form in GGUF", where="config.json, rope_parameters")
    return found


def _refuse(settings: Any, arch: str) -> None:
    """Settings with which llama.cpp would compute something else."""
    wrong = ""
    if arch == "qwen3moe" and not settings.norm_topk_prob:
        wrong = "norm_topk_prob: false (llama.cpp normalises the chosen experts' weights)"
    if arch == "qwen3moe" and (settings.decoder_sparse_step != 1 or settings.mlp_only_layers):
        wrong = "dense layers among the experts"
    if arch == "gemma3":
        scale = settings.query_pre_attn_scalar
        allowed = {head_dim(settings)} if settings.num_hidden_layers != 62 else {168}
        pattern = [
            "full_attention" if (i + 1) % 6 == 0 else "sliding_attention" for i in range(settings.num_hidden_layers)
        ]
        if scale not in allowed:
            wrong = f"query_pre_attn_scalar {scale} (llama.cpp divides by the root of {allowed.pop()})"
        elif list(settings.layer_types) != pattern:
            wrong = "another pattern of sliding windows than every sixth layer full"
    if getattr(settings, "hidden_act", None) not in (None, "silu") and arch != "gemma3":
        wrong = f"hidden_act {settings.hidden_act}"
    if wrong:
        raise ModelError(f"{settings.model_type} with {wrong} has no form in GGUF", where="config.json")
    if settings.model_type in ("mistral", "mixtral") and getattr(settings, "sliding_window", None):
        note(f"llama.cpp has no sliding window for {settings.model_type}: texts longer than "
             f"{settings.sliding_window} tokens are attended to in full")  # fmt: skip


def plans(settings: Any, weights: Weights) -> Iterator[Plan]:
    """Every tensor of the file, in order.  Raises ModelError for a tensor without a place."""
    import gguf

    arch = architecture(settings)
    enum = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    table = gguf.get_tensor_name_map(enum, settings.num_hidden_layers)
    yield from _rope_plans(settings)
    experts = _expert_groups(weights)
    done: set[tuple[str, str]] = set()
    tied = bool(getattr(settings, "tie_word_embeddings", False))
    for name in weights.names():
        if name.endswith((".rotary_emb.inv_freq", ".attention.bias", ".masked_bias")):
            continue
        if tied and name == "lm_head.weight":
            continue
        match = _EXPERT.match(name)
        if match is None:
            plain, dot, suffix = name.rpartition(".")
            found = table.get_name(plain)
            if found is None:
                raise ModelError(f"the tensor {name} has no place in GGUF's {arch}", where=str(weights.folder))
            yield Plan(found + dot + suffix, weights.shapes[name], _reader(settings, weights, name))
            continue
        key = (match["layer"], _EXPERT_NAMES[match["name"]])
        if key not in done:
            done.add(key)
            number = re.search(r"\.layers\.(\d+)\.", name)
            assert number is not None
            parts = experts[key]
            shape = (len(parts), *weights.shapes[parts[0]])
            yield Plan(f"blk.{number[1]}.ffn_{key[1]}_exps.weight", shape, _stacker(weights, parts))


def _expert_groups(weights: Weights) -> dict[tuple[str, str], list[str]]:
    groups: dict[tuple[str, str], list[tuple[int, str]]] = {}
    for name in weights.files:
        if match := _EXPERT.match(name):
            key = (match["layer"], _EXPERT_NAMES[match["name"]])
            groups.setdefault(key, []).append((int(match["number"]), name))
    return {key: [name for _, name in sorted(parts)] for key, parts in groups.items()}


def _stacker(weights: Weights, parts: list[str]) -> Callable[[], torch.Tensor]:
    return lambda: torch.stack([weights.get(part) for part in parts])


def _reader(settings: Any, weights: Weights, name: str) -> Callable[[], torch.Tensor]:
    arch = architecture(settings)
    if arch == "llama" and re.search(r"\.[qk]_proj\.(weight|bias)$", name):
        heads = settings.num_attention_heads if ".q_proj." in name else settings.num_key_value_heads
        return lambda: permuted(weights.get(name), heads)
    if arch == "gemma3" and name.endswith("norm.weight"):
        return lambda: weights.get(name).float() + 1.0
    return lambda: weights.get(name)


def permuted(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows [heads · (half, i)] of q or k as [heads · (i, half)]: halves of a head become neighbours."""
    pairs = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return pairs.transpose(1, 2).reshape(rows.shape)


def _rope_plans(settings: Any) -> Iterator[Plan]:
    """Factors by which frequencies are divided: llama3's smooth ones, longrope's two lists."""
    rope, _ = rope_parameters(settings)
    kind = rope.get("rope_type")
    if kind == "llama3":
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](settings, torch.device("cpu"))
        dim = head_dim(settings)
        base = 1.0 / (float(rope["rope_theta"]) ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))
        factors = (base / scaled.float()).contiguous()
        yield Plan("rope_freqs.weight", tuple(factors.shape), lambda: factors)
    if kind == "longrope":
        for name in ("long", "short"):
            values = torch.tensor(rope[f"{name}_factor"], dtype=torch.float32)
            yield Plan(f"rope_factors_{name}.weight", tuple(values.shape), lambda values=values: values)  # type: ignore[misc]
