"""Next-token loss over the labelled tokens of a batch: supervised fine-tuning, and pretraining where all are labelled.

The result is a *sum*.  Who divides, and by what, is the loop's business: by the loss tokens of the whole optimizer
step, over micro-batches and ranks, so two rows weigh the same in one batch as in two.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn import functional as F

from lumen.models.attention import model_inputs
from lumen.objectives.head import head_plan, loss_of_rows

IGNORE = -100


class HasLabels(Protocol):
    """What the objective reads of a `data.batch.Batch`."""

    input_ids: torch.Tensor
    labels: torch.Tensor
    position_ids: torch.Tensor
    segment_ids: torch.Tensor
    packed: bool


@dataclass
class LossSums:
    """Sums over the labelled tokens of a batch.

    loss_sum: fp32 scalar, differentiable.  num_loss_tokens: int.  num_correct: int64 scalar tensor; tokens whose
    largest logit was the target (a tensor, so that nothing waits for the device before the step needs it).
    """

    loss_sum: torch.Tensor
    num_loss_tokens: int
    num_correct: torch.Tensor


def shifted_targets(labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions [N] into the flattened [B*T] tokens that predict a labelled token, and those targets [N].

    Position i predicts labels[i + 1]; the last position of a row predicts nothing.
    """
    targets = F.pad(labels[:, 1:], (0, 1), value=IGNORE).reshape(-1)
    positions = (targets != IGNORE).nonzero().squeeze(1)
    return positions, targets[positions]


def loss_sum(model: nn.Module, batch: HasLabels) -> LossSums:
    """The summed loss of a batch; any transformers causal model, with or without PEFT adapters."""
    inputs: dict[str, Any] = model_inputs(batch, model)
    inputs["use_cache"] = False
    positions, targets = shifted_targets(batch.labels)
    plan = head_plan(model)
    if plan.decoder is None:
        logits = model(**inputs).logits
        rows = logits.reshape(-1, logits.shape[-1])[positions].float()
        loss = F.cross_entropy(rows, targets, reduction="sum")
        correct = (rows.detach().argmax(dim=-1) == targets).sum()
    else:
        hidden = plan.decoder(**inputs)[0]
        loss, correct = loss_of_rows(plan, hidden.reshape(-1, hidden.shape[-1])[positions], targets)
    return LossSums(loss, int(targets.numel()), correct)
