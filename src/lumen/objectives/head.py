"""Where a model's logits come from: decoder, head, scale and cap; found once, checked with numbers.

Most architectures compute `logits = lm_head(decoder(ids))`.  Some scale the logits (Cohere `logit_scale`, Granite
`logits_scaling`) or cap them (Gemma 2 `final_logit_softcapping`), and any new one may do something else.  So the plan
is not trusted: on a few tokens the losses it gives are compared with those from `model(...).logits`.  Where they
differ the plain path is taken, with one note.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn import functional as F

from lumen.core.log import note
from lumen.objectives.linear_cross_entropy import head_cross_entropy, linear_cross_entropy


@dataclass
class HeadPlan:
    """How the loss is computed for one model.

    decoder: maps model inputs to hidden states [B, T, D]; None: take the full logits of the whole model.
    head: [n, D] → [n, V].  plain: the head is exactly F.linear(h, weight, bias).
    scale, softcap: what the architecture does to the logits.
    """

    decoder: nn.Module | None
    head: nn.Module | None
    plain: bool = False
    scale: float = 1.0
    softcap: float | None = None


_plans: WeakKeyDictionary[nn.Module, HeadPlan] = WeakKeyDictionary()


def bare_model(model: Any) -> Any:
    """The transformers model inside PEFT's wrapper (with its adapters in place), or the model itself."""
    if hasattr(model, "get_base_model") and hasattr(model, "peft_config"):
        return model.get_base_model()
    return model


def _decoder_of(model: Any) -> nn.Module | None:
    prefix = getattr(model, "base_model_prefix", "")
    decoder = getattr(model, prefix, None) if prefix else None
    return decoder if isinstance(decoder, nn.Module) and decoder is not model else None


def _guess(model: Any) -> HeadPlan:
    bare = bare_model(model)
    decoder = _decoder_of(bare)
    head = bare.get_output_embeddings() if hasattr(bare, "get_output_embeddings") else None
    is_prompt_learning = any(
        getattr(config, "is_prompt_learning", False) for config in getattr(model, "peft_config", {}).values()
    )
    if decoder is None or head is None or is_prompt_learning:
        return HeadPlan(None, None)
    config = bare.config.get_text_config() if hasattr(bare.config, "get_text_config") else bare.config
    scale = float(getattr(config, "logit_scale", None) or 1.0)
    scale /= float(getattr(config, "logits_scaling", None) or 1.0)
    softcap = getattr(config, "final_logit_softcapping", None)
    plain = type(head) is nn.Linear and not (head._forward_hooks or head._forward_pre_hooks)
    return HeadPlan(decoder, head, plain, scale, None if softcap is None else float(softcap))


@torch.no_grad()
def _agrees(model: Any, plan: HeadPlan) -> bool:
    """Compare per-token losses of the plan with those of the model's own logits on 12 tokens."""
    assert plan.decoder is not None
    device = next(model.parameters()).device
    vocabulary = bare_model(model).config.get_text_config().vocab_size
    ids = (torch.arange(12, device=device) * 7919 % max(1, vocabulary - 1)).view(1, -1)
    training = {module: module.training for module in model.modules()}
    model.eval()  # dropout would differ between the two
    try:
        logits = model(input_ids=ids, use_cache=False).logits[0, :-1].float()
        hidden = plan.decoder(input_ids=ids, use_cache=False)[0][0, :-1]
        targets = ids[0, 1:]
        expected = F.cross_entropy(logits, targets, reduction="none")
        found = torch.stack([loss_of_rows(plan, hidden[i : i + 1], targets[i : i + 1])[0] for i in range(11)])
    except (TypeError, ValueError, RuntimeError, AttributeError, IndexError):
        return False
    finally:
        for module, mode in training.items():
            module.training = mode
    low_precision = next(model.parameters()).dtype in (torch.bfloat16, torch.float16)
    return bool(torch.allclose(found, expected, rtol=2e-2 if low_precision else 1e-4, atol=1e-4))


def head_plan(model: nn.Module) -> HeadPlan:
    """The plan of a model, made and checked at the first call."""
    plan = _plans.get(model)
    if plan is None:
        plan = _guess(model)
        if plan.decoder is None or not _agrees(model, plan):
            note(
                f"{type(bare_model(model)).__name__} computes its logits in a way of its own: the loss takes the full "
                "logits, which needs more memory than the chunked loss"
            )
            plan = HeadPlan(None, None)
        _plans[model] = plan
    return plan


def forget_plan(model: nn.Module) -> None:
    """Make the plan anew at the next call: the head was replaced."""
    _plans.pop(model, None)


def loss_of_rows(plan: HeadPlan, hidden: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss sum and number right of hidden rows [N, D] with targets [N]."""
    head: Any = plan.head
    if plan.plain:
        return linear_cross_entropy(
            hidden.to(head.weight.dtype), head.weight, head.bias, targets, scale=plan.scale, softcap=plan.softcap
        )
    call: Callable[[torch.Tensor], torch.Tensor] = head
    vocabulary = getattr(head, "out_features", None) or 1 << 16
    return head_cross_entropy(call, hidden, targets, vocabulary=vocabulary, scale=plan.scale, softcap=plan.softcap)
