"""How many bytes a decoder layer keeps for its backward pass: counted, not guessed.

Formulas for activation memory go stale with every change of a model's code: a normalisation that computes in fp32
keeps fp32 copies, LoRA in fp32 keeps an fp32 copy of its input, a fused attention keeps no score matrix.  Autograd
knows.  It asks for every tensor it saves through a hook, so a forward pass on the meta device (shapes without storage,
no arithmetic) tells exactly what a real one would keep.  Two models, of one and of two layers, are run; the difference
is a layer, the rest is what does not grow with depth.

Storages are counted once, parameters not at all.  Attention is traced as the fused kernel that every backend's
`sdpa` takes (it keeps queries, keys, values, output and one number per row).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from lumen.adapters.config import AdapterConfig
from lumen.adapters.inject import inject
from lumen.planner.shape import as_config, meta_model

ATTENTION = "lumen_planner"


@dataclass(frozen=True)
class Saved:
    """Bytes that autograd keeps: for one decoder layer, and for the rest of the model without its loss."""

    layer: int
    rest: int


def saved_for_backward(
    config: Any,
    *,
    rows: int,
    tokens: int,
    dtype: Any,
    lora_rank: int = 0,
    lora_targets: Iterable[str] = ("all",),
    lora_dropout: float = 0.0,
) -> Saved:
    """Count what a training step keeps.

    config:  a transformers configuration or the contents of a `config.json`.
    rows, tokens: the micro-batch [rows, tokens].
    dtype:   torch dtype of weights and activations; LoRA parameters are fp32, as in training.
    lora_*:  0 for no adapter; else frozen base and adapters on the named linear layers.
    """
    first, second = (
        _trace(config, depth, rows, tokens, dtype, lora_rank, tuple(lora_targets), lora_dropout) for depth in (1, 2)
    )
    return Saved(layer=second - first, rest=max(0, 2 * first - second))


def _shallow(config: Any, depth: int) -> Any:
    """The configuration with `depth` decoder layers."""
    config = as_config(config)
    text = config.get_text_config()
    text.pad_token_id = None  # some models look for padding among the ids, which have no values here
    text.num_hidden_layers = depth
    if getattr(text, "layer_types", None):
        text.layer_types = list(text.layer_types[:depth])
    return config


def _trace(
    config: Any,
    depth: int,
    rows: int,
    tokens: int,
    dtype: Any,
    rank: int,
    targets: tuple[str, ...],
    dropout: float,
) -> int:
    import torch
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, _attention)
    model = meta_model(_shallow(config, depth), dtype=dtype, attn_implementation=ATTENTION)
    if rank:
        settings = AdapterConfig(lora_rank=rank, lora_target=list(targets), lora_dropout=dropout)
        with torch.device("meta"):
            model = inject(model, settings)
    model.train()
    parameters = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    saved: dict[int, int] = {}
    alive: list[torch.Tensor] = []  # a freed storage's address could be taken by another one

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in parameters:
            saved[storage._cdata] = storage.nbytes()
            alive.append(tensor)
        return tensor

    with torch.device("meta"), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        ids = torch.zeros((rows, tokens), dtype=torch.long)
        positions = torch.arange(tokens)[None].expand(rows, tokens)
        model(input_ids=ids, position_ids=positions, use_cache=False, logits_to_keep=1)
    return sum(saved.values())


def _attention(module: Any, query: Any, key: Any, value: Any, mask: Any, **rest: Any) -> tuple[Any, None]:
    """Fused causal attention on [B, H, T, D]: the output, and nothing that grows with the square of T."""
    import torch

    output = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, True)[0]
    return output.transpose(1, 2).contiguous(), None
