"""How a batch enters a model's attention.

Rows are padded on the right and attention is causal, so no real token ever sees padding: an unpacked batch needs no
mask and takes the attention kernel's causal fast path.  A packed row needs one: token i sees token j when both belong
to the same example and j <= i, and, in a layer with a sliding window w, i - j < w.  Inside one example positions are
contiguous, so the distance in the row is the distance in the example.

Lumen's own attention enters through transformers' AttentionInterface under three names: `lumen_native` is the C++
kernel (`kernels.cpu.attention`); `lumen`, for rows of one fixed length, and `lumen_whole`, for lengths that vary, are
plain torch for a compiler (`kernels.reference.attention`).  All read `segment_ids` themselves, as a [B, 1, 1, T]
"mask", so a packed batch makes no mask at all.  `use_native_attention` chooses the kernel wherever it can run,
`use_compiled_attention` the others where the layers are compiled on a CPU; what they do not compute (a KV cache,
dropout on the weights, a position bias) goes to SDPA.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from lumen.core.log import note
from lumen.kernels.cpu.attention import fits, native_attention
from lumen.kernels.cpu.library import missing
from lumen.kernels.reference.attention import causal_attention

NATIVE = "lumen_native"
OWN = ("lumen", "lumen_whole", NATIVE)
"""Names of Lumen's attention in transformers' AttentionInterface."""

BLOCK = 128
"""Queries of a block under the name `lumen`; measured against 256 and 512 (docs/benchmarks.md)."""


class HasSegments(Protocol):
    """What is read of a `data.batch.Batch`."""

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    segment_ids: torch.Tensor
    packed: bool


def block_mask(segment_ids: torch.Tensor, window: int | None = None) -> torch.Tensor:
    """bool [B, 1, T, T], True where the query (third dimension) sees the key (fourth).

    segment_ids: [B, T]; padding (0) sees padding, so that no row of the mask is empty and the softmax stays finite.
    window: of a sliding-window layer; None for full attention.
    """
    place = torch.arange(segment_ids.shape[1], device=segment_ids.device)
    distance = place[:, None] - place[None, :]
    seen = distance >= 0
    if window is not None:
        seen &= distance < window
    same = segment_ids[:, :, None] == segment_ids[:, None, :]
    return (same & seen).unsqueeze(1)


def model_inputs(batch: HasSegments, model: Any) -> dict[str, Any]:
    """Keyword arguments of `model(...)` or its decoder for a batch."""
    inputs: dict[str, Any] = {"input_ids": batch.input_ids}
    config = model.config.get_text_config()
    implementation = getattr(config, "_attn_implementation", None) or "eager"
    if not batch.packed and implementation not in (
        OWN[0],
        NATIVE,
    ):  # with a mask always or never, one graph is compiled, not two
        return inputs
    inputs["position_ids"] = batch.position_ids
    if "flash" in implementation:
        return inputs  # reads the segments from the positions that restart
    dtype = next(model.parameters()).dtype
    if implementation in OWN:
        segments = batch.segment_ids[:, None, None, :]
        sliding = "sliding_attention" in set(getattr(config, "layer_types", None) or ())
        both = {"full_attention": segments, "sliding_attention": segments}
        return {**inputs, "attention_mask": both if sliding else segments}

    def mask(window: int | None) -> torch.Tensor:
        seen = block_mask(batch.segment_ids, window)
        if implementation == "eager":
            return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, torch.finfo(dtype).min)
        return seen

    window = getattr(config, "sliding_window", None)
    kinds = set(getattr(config, "layer_types", None) or ())
    if "sliding_attention" in kinds:
        inputs["attention_mask"] = {"full_attention": mask(None), "sliding_attention": mask(window)}
    else:
        inputs["attention_mask"] = mask(None if kinds else window)
    return inputs


def _forward(block: int | None, *, native: bool = False) -> Any:
    def forward(
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float | None = None,
        dropout: float = 0.0,
        sliding_window: int | None = None,
        softcap: float | None = None,
        is_causal: bool | None = None,
        **rest: Any,
    ) -> tuple[torch.Tensor, None]:
        segments = None
        if attention_mask is not None and not attention_mask.is_floating_point() and attention_mask.dtype != torch.bool:
            segments = attention_mask[:, 0, 0, :]
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        ours = query.shape[2] == key.shape[2] and (attention_mask is None or segments is not None)
        if not ours or not causal or dropout or rest.get("position_bias") is not None:
            if segments is not None:
                attention_mask = block_mask(segments, sliding_window)
            return sdpa_attention_forward(
                module, query, key, value, attention_mask,
                scaling=scaling, dropout=dropout, softcap=softcap, is_causal=is_causal, **rest,
            )  # fmt: skip
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        if native and fits(query, value, softcap):
            return native_attention(query, key, value, segments, scale=scale, window=sliding_window), None
        out = causal_attention(
            query, key, value, segments, scale=scale, window=sliding_window, softcap=softcap, block=block
        )
        return out.transpose(1, 2).contiguous(), None

    return forward


def use_native_attention(model: Any) -> bool:
    """Switch a bf16 model on a CPU from SDPA to the C++ attention; says whether it did.

    Not done where the kernel cannot run, and for what `use_compiled_attention` leaves alone too.
    """
    config = _switchable(model)
    if config is None:
        return False
    heads = getattr(config, "num_attention_heads", None) or 1
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    parameter = next(model.parameters())
    probe = torch.empty(1, 1, 1, size, dtype=parameter.dtype, device=parameter.device)
    if not fits(probe, probe, getattr(config, "attn_logit_softcapping", None)):
        return False
    if why := missing():
        note(f"attention runs in plain torch: {why}; the result is the same, slower")
        return False
    return _switch(model, NATIVE)


def _switchable(model: Any) -> Any:
    """The text config of a model whose SDPA may be replaced; None where it may not."""
    bare = model.get_base_model() if hasattr(model, "peft_config") else model
    if getattr(bare.config, "_attn_implementation", None) != "sdpa" or not bare._can_set_attn_implementation():
        return None
    if any(hasattr(module, "sinks") for module in bare.modules()):
        return None
    return bare.config.get_text_config()


def _switch(model: Any, name: str) -> bool:
    bare = model.get_base_model() if hasattr(model, "peft_config") else model
    bare.set_attn_implementation(name)
    return bool(bare.config.get_text_config()._attn_implementation == name)


def use_compiled_attention(model: Any, *, fixed_length: bool) -> bool:
    """Switch a model whose layers will be compiled on a CPU from SDPA to Lumen's attention; says whether it did.

    fixed_length: every row has the same number of tokens, so that the block loop unrolls once.
    Not done for a model that chose another attention, does not use the interface, or has attention sinks.
    """
    return _switchable(model) is not None and _switch(model, OWN[0] if fixed_length else OWN[1])


for _name, _block in zip(OWN, (BLOCK, None, BLOCK), strict=True):
    AttentionInterface.register(_name, _forward(_block, native=_name == NATIVE))
    AttentionMaskInterface.register(_name, sdpa_mask)
