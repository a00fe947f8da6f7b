"""Merge an adapter into its base: W + s·B·A, computed in fp32 and cast once at the end.

Adding in bf16 would round every product and lose updates smaller than 1/256 of a weight twice; in fp32 only the last
cast rounds.  DoRA's magnitudes, embeddings and GPT-2's transposed weights follow PEFT's own `merge` on the fp32
weight.  A base stored as codes is dequantised first: codes are never added into.

Each target's change is measured.  A target whose ΔW is exactly zero was not trained or not loaded, and a merge of such
an adapter would hand out the base model under a new name.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from lumen.core import ModelError
from lumen.models.layers import is_tied
from lumen.quant.linear import QuantLinear


@dataclass
class MergeReport:
    """What a merge changed.

    changes:   target name → ‖ΔW‖ / ‖W‖ (Frobenius, fp32).
    unchanged: targets whose ΔW is exactly zero.
    rounded:   targets whose ΔW vanished when the sum was cast to the model's dtype.
    """

    changes: dict[str, float] = field(default_factory=dict)
    unchanged: list[str] = field(default_factory=list)
    rounded: list[str] = field(default_factory=list)
    whole: list[str] = field(default_factory=list)

    def check(self, *, allow_unchanged: bool = False) -> None:
        """Raise ModelError where the merge changed nothing, or left targets as they were."""
        everything = len(self.unchanged) == len(self.changes) and not self.whole
        if everything or (self.unchanged and not allow_unchanged):
            names = ", ".join(self.unchanged[:4]) + (" …" if len(self.unchanged) > 4 else "")
            what = (
                "the adapter changes nothing: the merged model would be identical to the base (ΔW = 0 everywhere)"
                if everything
                else f"ΔW = 0 in {len(self.unchanged)} of {len(self.changes)} targets"
            )
            raise ModelError(
                what,
                where=names,
                fix="check that the adapter was trained and belongs to this base"
                + ("" if everything else "; --allow-unchanged merges the rest"),
            )
        if self.changes and len(self.rounded) == len(self.changes) and not self.whole:
            raise ModelError(
                "every ΔW is lost when the merged weights are cast: the model would be identical to the base",
                where=", ".join(self.rounded[:4]),
                fix="merge into float32 (infer_dtype: float32), or train longer",
            )


def merge_in_place(model: Any) -> tuple[Any, MergeReport]:
    """Merge the active adapter of a PeftModel; returns the plain model and the report (not yet checked).

    Weights keep their dtype.  The PeftModel must not be used afterwards.  Embedding and head of a tied model stay one
    parameter if they end equal; else they are untied and the config says so.
    """
    from peft.tuners.lora import LoraLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    report = MergeReport()
    base = model.get_base_model()
    was_tied = bool(getattr(base.config, "tie_word_embeddings", False))
    _untie_adapted(base)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, layer in base.named_modules():
            if isinstance(layer, LoraLayer):
                _merge_layer(name, layer, report)
            elif isinstance(layer, AuxiliaryTrainingWrapper):
                report.whole.append(name)
        merged = model.merge_and_unload()
    if was_tied:
        _settle_tie(merged)
    return merged, report


def _merge_layer(name: str, layer: Any, report: MergeReport) -> None:
    base = layer.get_base_layer()
    if isinstance(base, QuantLinear):
        base = layer.base_layer = base.to_linear()
        layer.fan_in_fan_out = not isinstance(base, nn.Linear)
    before = base.weight.data
    base.weight.data = before.float().clone()
    layer.merge(safe_merge=False)
    merged = base.weight.data
    if not torch.isfinite(merged).all():
        raise ModelError(f"merging {name} gives values that are not finite", where=name, fix="the adapter is damaged")
    norm = before.float().norm().item()
    delta = (merged - before.float()).norm().item()
    base.weight.data = merged.to(before.dtype)
    report.changes[name] = delta / norm if norm else delta
    if delta == 0.0:
        report.unchanged.append(name)
    elif torch.equal(base.weight.data, before):
        report.rounded.append(name)


def _untie_adapted(model: Any) -> None:
    """An adapter on a tied embedding or head changes one use of the shared weight: give the head its own copy."""
    from peft.tuners.lora import LoraLayer

    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    layers = [part for part in (embedding, head) if isinstance(part, LoraLayer)]
    if head is None or not layers:
        return
    inner: list[Any] = [part.get_base_layer() if isinstance(part, LoraLayer) else part for part in (embedding, head)]
    if inner[0].weight is inner[1].weight:
        inner[1].weight = nn.Parameter(inner[1].weight.detach().clone(), requires_grad=False)


def _settle_tie(model: Any) -> None:
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if is_tied(model):
        model.config.tie_word_embeddings = True
    elif torch.equal(embedding.weight, head.weight):
        head.weight = embedding.weight
        model.config.tie_word_embeddings = True
    else:
        model.config.tie_word_embeddings = False
