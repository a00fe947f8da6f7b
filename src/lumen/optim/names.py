"""HF's `optim` names: which of them act here, and as what."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

from lumen.core.errors import ConfigError
from lumen.core.log import note
from lumen.optim.adamw import SGD, AdamW
from lumen.optim.base import NamedOptimizer

_SAME = {"adamw_torch", "adamw"}
_NOTED = {
    "adamw_torch_fused": "the same numbers; ours updates all tensors with one call",
    "adamw_hf": "removed from transformers; AdamW of torch, the same algorithm",
    "adamw_torch_xla": "AdamW of torch, the same algorithm",
    "adamw_torch_npu_fused": "AdamW of torch, the same algorithm",
}
_KNOWN_ELSEWHERE = [
    "adafactor", "adamw_anyprecision", "adamw_torch_4bit", "adamw_torch_8bit", "ademamix", "adamw_bnb_8bit",
    "adamw_8bit", "ademamix_8bit", "lion_8bit", "lion_32bit", "paged_adamw_32bit", "paged_adamw_8bit",
    "paged_ademamix_32bit", "paged_ademamix_8bit", "paged_lion_32bit", "paged_lion_8bit", "rmsprop", "rmsprop_bnb",
    "rmsprop_bnb_8bit", "rmsprop_bnb_32bit", "galore_adamw", "galore_adamw_8bit", "galore_adafactor", "lomo",
    "adalomo", "grokadamw", "schedule_free_radam", "schedule_free_adamw", "schedule_free_sgd", "apollo_adamw",
    "stable_adamw", "adagrad", "adamw_apex_fused",
]  # fmt: skip


def resolve_name(optim: str) -> str:
    """`adamw` or `sgd` for an HF `optim` name.

    Raises ConfigError for a name of transformers that is not built here, and for an unknown one with the nearest.
    """
    if optim in _SAME:
        return "adamw"
    if optim in _NOTED:
        note(f"optim: {optim} runs as adamw_torch ({_NOTED[optim]})")
        return "adamw"
    if optim == "sgd":
        return "sgd"
    choices = sorted(_SAME | set(_NOTED) | {"sgd"})
    if optim in _KNOWN_ELSEWHERE:
        raise ConfigError(
            f"optim: {optim} is not built in Lumen", where="optim", fix=f"use one of {', '.join(choices)}"
        )
    near = difflib.get_close_matches(optim, choices + _KNOWN_ELSEWHERE, n=1)
    raise ConfigError(
        f"unknown optimizer {optim!r}" + (f", did you mean {near[0]!r}?" if near else ""),
        where="optim",
        fix=f"use one of {', '.join(choices)}",
    )


def make_optimizer(
    optim: str,
    groups: Iterable[dict[str, Any]],
    *,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    **common: Any,
) -> NamedOptimizer:
    """The optimizer for an HF `optim` name over `parameter_groups(...)`.

    betas, eps: AdamW's.  common: `lr`, `weight_decay`, `master` and `seed`, as every optimizer here takes them.
    """
    if resolve_name(optim) == "sgd":
        return SGD(groups, **common)
    return AdamW(groups, betas=betas, eps=eps, **common)
