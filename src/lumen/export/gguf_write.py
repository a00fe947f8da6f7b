"""GGUF v3: one file with keys, tokenizer and tensors, written tensor by tensor.

    header   magic, version, counts          keys   name, type, value
    infos    name, shape (last dimension first), type, offset          data   each tensor at a multiple of 32 bytes

Sizes and offsets follow from shapes and types, so the header is written first and memory never holds more than one
tensor (of a mixture of experts, the experts' stacked matrix).  Matrices take the file's type; norms, biases, routers
and rope factors stay fp32.  Q4_0 keeps embedding and output in Q8_0, where four bits hurt most; a matrix whose rows
are no multiple of a block falls back to F16 (as llama.cpp does) and is counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lumen.core import ModelError, note
from lumen.export import gguf_model
from lumen.export.gguf_kquants import K_QUANTS, k_type, require_libgguf
from lumen.export.gguf_vocab import Vocabulary
from lumen.export.stage import Staged
from lumen.formats import QuantSpec, encode
from lumen.formats.ggml import gguf_blocks

_UINT8_TYPES = {"q8_0": QuantSpec.parse("q8_0"), "q4_0": QuantSpec.parse("q4_0")}
_FILE_TYPES = {
    "f16": "MOSTLY_F16", "bf16": "MOSTLY_BF16", "q8_0": "MOSTLY_Q8_0", "q4_0": "MOSTLY_Q4_0", "q4_k": "MOSTLY_Q4_K_S",
    "q4_k_m": "MOSTLY_Q4_K_M", "q5_k": "MOSTLY_Q5_K_S", "q5_k_m": "MOSTLY_Q5_K_M", "q6_k": "MOSTLY_Q6_K",
}  # fmt: skip


@dataclass
class GgufWritten:
    """types: ggml type → tensors.  fallbacks: matrices that could not take the file's type.  bytes: of all tensors."""

    types: Counter[str] = field(default_factory=Counter)
    fallbacks: list[str] = field(default_factory=list)
    bytes: int = 0
    parameters: int = 0


def write_gguf(staged: Staged, settings: Any, vocabulary: Vocabulary, path: Path, kind: str) -> GgufWritten:
    """Write `path`.  settings: the model's transformers config.  kind: f16, bf16, q8_0, q4_0 or a K-quant."""
    import gguf

    if kind in K_QUANTS:
        require_libgguf()
    arch = gguf_model.architecture(settings)
    settings_keys = gguf_model.keys(settings)
    plans = list(gguf_model.plans(settings, staged.weights))
    writer = gguf.GGUFWriter(path, arch)
    result = GgufWritten()
    try:
        _add_keys(writer, arch, settings_keys, staged, plans, kind)
        _add_vocabulary(writer, vocabulary)
        chosen = []
        for plan in plans:
            type_ = _type_of(plan, kind, settings.num_hidden_layers, result)
            ggml = getattr(gguf.GGMLQuantizationType, type_.upper())
            block, size = gguf.GGML_QUANT_SIZES[ggml]
            nbytes = torch.Size(plan.shape).numel() // block * size
            writer.add_tensor_info(plan.name, plan.shape, np.dtype(np.float32), nbytes, raw_dtype=ggml)
            chosen.append((plan, type_))
            result.types[type_.upper()] += 1
            result.bytes += nbytes
            result.parameters += torch.Size(plan.shape).numel() if not plan.name.startswith("rope_") else 0
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for plan, type_ in chosen:
            writer.write_tensor_data(as_bytes(plan.read(), type_, plan.name))
    finally:
        writer.close()
    if result.fallbacks:
        note(f"{len(result.fallbacks)} matrices have rows that are no multiple of a block of {kind} and take another "
             f"type, such as {result.fallbacks[0]}")  # fmt: skip
    return result


def _type_of(plan: gguf_model.Plan, kind: str, layers: int, result: GgufWritten) -> str:
    if not plan.is_matrix:
        return "f32"
    wanted = kind
    if kind in K_QUANTS:
        wanted = k_type(plan.name, kind, layers)
    elif kind == "q4_0" and plan.name in ("token_embd.weight", "output.weight"):
        wanted = "q8_0"
    if wanted in ("f16", "bf16"):
        return wanted
    width = plan.shape[-1]
    if wanted.endswith("_k") and width % 256:
        result.fallbacks.append(plan.name)
        wanted = "q8_0"
    if width % 32:
        if plan.name not in result.fallbacks:
            result.fallbacks.append(plan.name)
        return "f16"
    return wanted


def as_bytes(tensor: torch.Tensor, type_: str, name: str) -> np.ndarray:
    """The tensor's data in a ggml type, as an array that is written as it is."""
    if type_ == "f32":
        return tensor.float().contiguous().numpy()
    if type_ == "bf16":
        return tensor.to(torch.bfloat16).contiguous().view(torch.int16).numpy()
    if type_ == "f16":
        half = tensor.to(torch.float16)
        if not bool(torch.isfinite(half).all()):
            raise ModelError(f"{name} has values that F16 cannot hold", where=name, fix="export gguf-bf16 or gguf-q8_0")
        return half.contiguous().numpy()
    if type_ in _UINT8_TYPES:
        spec = _UINT8_TYPES[type_]
        codes, scales = encode(tensor, spec, name=name)
        return gguf_blocks(codes, scales, spec).contiguous().numpy()
    import gguf
    from libgguf import quantize_rows

    return quantize_rows(tensor.float().contiguous().numpy(), int(getattr(gguf.GGMLQuantizationType, type_.upper())))


def _add_keys(writer: Any, arch: str, found: dict[str, Any], staged: Staged, plans: list[Any], kind: str) -> None:
    import gguf

    writer.add_type(gguf.GGUFType.MODEL)
    writer.add_name(staged.name)
    writer.add_size_label(_size_label(plans, found.get("expert_count", 0)))
    if staged.license:
        writer.add_license(staged.license)
    if not Path(staged.source).exists():  # a name, not a path of this machine
        writer.add_base_model_count(1)
        writer.add_base_model_name(0, staged.source)
    writer.add_file_type(int(getattr(gguf.LlamaFileType, _FILE_TYPES[kind])))
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    for key, value in found.items():
        add: Callable[[str, Any], None] = (
            writer.add_string if isinstance(value, str) else writer.add_float32 if isinstance(value, float)
            else writer.add_uint32
        )  # fmt: skip
        add(f"{arch}.{key}", value)


def _size_label(plans: list[Any], experts: int) -> str:
    import gguf

    total = shared = each = 0
    for plan in plans:
        size = torch.Size(plan.shape).numel()
        total += size
        if "_exps." in plan.name:
            each += size // plan.shape[0]
        else:
            shared += size
    return gguf.size_label(total, shared, each, experts)


def _add_vocabulary(writer: Any, found: Vocabulary) -> None:
    writer.add_tokenizer_model(found.model)
    writer.add_tokenizer_pre(found.pre)
    writer.add_token_list(found.tokens)
    writer.add_token_types(found.types)
    if found.scores is not None:
        writer.add_token_scores(found.scores)
    if found.merges is not None:
        writer.add_token_merges(found.merges)
    names = {"unknown": "unk", "padding": "pad"}
    for name, index in found.ids.items():
        getattr(writer, f"add_{names.get(name, name)}_token_id")(index)
    writer.add_add_bos_token(found.add_bos)
    writer.add_add_eos_token(found.add_eos)
    if found.space_prefix is not None:
        writer.add_add_space_prefix(found.space_prefix)
    if found.chat_template:
        writer.add_chat_template(found.chat_template)
