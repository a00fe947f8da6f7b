"""One AdamW step as a function of tensors: the reference that every faster optimizer kernel is tested against.

AdamW (Loshchilov & Hutter, ICLR 2019, algorithm 2) keeps two running means of the gradient g,

    m <- b1 m + (1 - b1) g            v <- b2 v + (1 - b2) g^2

corrects both for having started at zero, m^ = m / (1 - b1^t) and v^ = v / (1 - b2^t), and moves

    w <- w - lr (m^ / (sqrt(v^) + eps) + weight_decay w)

The decay is decoupled: it does not pass through m and v.  The order of roundings below is that of torch's own AdamW,
so the two agree to the last bit on one device.  A list of tensors is updated with torch's `_foreach_` operations: a
LoRA run has hundreds of small tensors, and one call for all of them costs far less than a call for each.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def adamw_step(
    param: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
) -> None:
    """Update one parameter in place.

    param, grad, exp_avg, exp_avg_sq: one shape; fp32 (other dtypes round at every operation).
    step: 1 for the first update.
    """
    adamw_step_many(
        [param], [grad], [exp_avg], [exp_avg_sq],
        lr=lr, beta1=beta1, beta2=beta2, eps=eps, weight_decay=weight_decay, step=step,
    )  # fmt: skip


def adamw_step_many(
    params: Sequence[torch.Tensor],
    grads: Sequence[torch.Tensor],
    exp_avgs: Sequence[torch.Tensor],
    exp_avg_sqs: Sequence[torch.Tensor],
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
) -> None:
    """Update a list of parameters in place; all have made the same number of steps.  Nothing happens to an empty list.

    Source: algorithm 2 of arXiv 1711.05101, with the bias corrections folded into the step size and the denominator.
    """
    if not params:
        return
    p, g, m, v = list(params), list(grads), list(exp_avgs), list(exp_avg_sqs)
    if weight_decay != 0:
        torch._foreach_mul_(p, 1 - lr * weight_decay)
    torch._foreach_lerp_(m, g, 1 - beta1)
    torch._foreach_mul_(v, beta2)
    torch._foreach_addcmul_(v, g, g, value=1 - beta2)
    correction1 = 1 - beta1**step
    correction2 = (1 - beta2**step) ** 0.5
    denominator = torch._foreach_sqrt(v)
    torch._foreach_div_(denominator, correction2)
    torch._foreach_add_(denominator, eps)
    torch._foreach_addcdiv_(p, m, denominator, value=-lr / correction1)


def sgd_step_many(
    params: Sequence[torch.Tensor],
    grads: Sequence[torch.Tensor],
    *,
    lr: float,
    weight_decay: float,
) -> None:
    """w <- w - lr (g + weight_decay w), in place, without momentum (HF's `optim: sgd`)."""
    if not params:
        return
    p, g = list(params), list(grads)
    if weight_decay != 0:
        g = list(torch._foreach_add(g, p, alpha=weight_decay))
    torch._foreach_add_(p, g, alpha=-lr)


def stochastic_round_bf16(values: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """fp32 → bf16, up or down with probabilities that make the mean exact: (bits + U[0, 2^16)) & ~0xFFFF.

    values: fp32, any shape.  bits: int64 of as many elements, uniform 32-bit integers (the low 16 are used).
    Non-finite values pass through unchanged.
    """
    noise = (bits.reshape(values.shape) & 0xFFFF).to(torch.int32)
    rounded = (values.contiguous().view(torch.int32) + noise) & -65536
    result = rounded.view(torch.float32)
    return torch.where(torch.isfinite(values), result, values).to(torch.bfloat16)
