"""How a batch enters a model's attention.

Rows are padded on the right and attention is causal, so no real token ever sees padding: an unpacked batch needs no
mask and takes the attention kernel's causal fast path.  A packed row needs one: token i sees token j when both belong
to the same example and j <= i, and, in a layer with a sliding window w, i - j < w.  Inside one example positions are
contiguous, so the distance in the row is the distance in the example.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch


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
    if not batch.packed:
        return inputs
    config = model.config.get_text_config()
    implementation = getattr(config, "_attn_implementation", None) or "eager"
    inputs["position_ids"] = batch.position_ids
    if "flash" in implementation:
        return inputs  # reads the segments from the positions that restart
    dtype = next(model.parameters()).dtype

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
