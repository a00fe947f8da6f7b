"""Cross-entropy of a linear head without ever holding its logits.

Logits of 8,192 tokens over 152,000 words in fp32 are 5 GB, and the plain way keeps several copies: the logits, their
fp32 version, the softmax, its gradient.  Three observations remove them:

1. Only labelled positions have a loss.  Their hidden rows are gathered first; prompts and padding cost nothing.
2. The loss of a row needs that row's logits only.  Rows are done in chunks; a chunk's logits are made, used and
   dropped.
3. With z = H W^T, softmax p and one-hot y the gradients are dH = (p - y) W and dW = (p - y)^T H.  Everything they
   need is at hand while the chunk's logits exist, so the *forward* pass computes them for an upstream gradient of 1;
   backward is a multiplication with the real one (the loss is a sum, so the upstream gradient is one number).

On a CPU with AVX512-BF16 a frozen bf16 head runs in C++ (`kernels.cpu.loss`): the same in a third less time, and
without fp32 logits.

The softmax is fp32, also where the product ran in bf16.  A head whose product is not a plain matrix (LoRA on the head,
quantised GEMMs, dropout) takes the general path: the same chunks, each recomputed in the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lumen.kernels.cpu import loss as native

CHUNK_BYTES = 128 << 20
"""fp32 logits of one chunk at most.  Every chunk reads the whole head: small ones are slow, large ones hold memory."""


def chunk_rows(vocabulary: int, budget: int = CHUNK_BYTES) -> int:
    """Rows of a chunk whose fp32 logits take about `budget` bytes; a multiple of 16, at least 16."""
    return max(16, budget // (4 * vocabulary) // 16 * 16)


def _softcap_(logits: torch.Tensor, softcap: float | None) -> torch.Tensor:
    """z <- c tanh(z / c), in place (Gemma 2)."""
    if softcap is not None:
        logits.div_(softcap).tanh_().mul_(softcap)
    return logits


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        scale: float,
        softcap: float | None,
        rows: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        want_hidden, want_weight, want_bias = ctx.needs_input_grad[:3]
        if not want_weight and bias is None and softcap is None and native.fits(hidden, weight, scale):
            loss, correct, d_hidden = native.linear_loss(
                hidden,
                weight,
                targets,
                scale=scale,
                gradient=want_hidden,
                rows=2 * rows,  # half as wide as fp32
            )
            ctx.save_for_backward(d_hidden, None, None)
            ctx.mark_non_differentiable(correct)
            return loss, correct
        d_hidden = torch.empty_like(hidden) if want_hidden else None
        d_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device) if want_weight else None
        d_bias = torch.zeros_like(bias, dtype=torch.float32) if want_bias and bias is not None else None
        loss = torch.zeros((), dtype=torch.float32, device=hidden.device)
        correct = torch.zeros((), dtype=torch.int64, device=hidden.device)
        for start in range(0, hidden.shape[0], rows):
            h = hidden[start : start + rows]
            target = targets[start : start + rows, None]
            # F.linear, like the model's own head: the logits round as they would in model(...)
            z = F.linear(h, weight, bias).float()
            if scale != 1.0:
                z.mul_(scale)
            z = _softcap_(z, softcap)
            largest = z.amax(dim=-1, keepdim=True)
            chosen = z.gather(1, target)
            correct += (chosen >= largest).sum()
            slope = z.square().div_(-(softcap**2)).add_(1.0) if softcap is not None else None  # d softcap(z) / dz
            p = z.sub_(largest).exp_()
            total = p.sum(dim=-1, keepdim=True)
            loss += (total.log() + largest - chosen).sum()
            if not (want_hidden or want_weight or want_bias):
                continue
            p.div_(total)
            p.scatter_add_(1, target, torch.full_like(chosen, -1.0))
            if slope is not None:
                p.mul_(slope)
            if scale != 1.0:
                p.mul_(scale)
            d_z = p.to(h.dtype)
            if d_hidden is not None:
                torch.matmul(d_z, weight, out=d_hidden[start : start + rows])
            if d_weight is not None:
                d_weight += d_z.T @ h
            if d_bias is not None:
                d_bias += p.sum(dim=0)
        ctx.save_for_backward(d_hidden, d_weight, d_bias)
        ctx.weight_dtype = weight.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.mark_non_differentiable(correct)
        return loss, correct

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        upstream = grads[0]
        d_hidden, d_weight, d_bias = ctx.saved_tensors
        return (
            None if d_hidden is None else d_hidden * upstream.to(d_hidden.dtype),
            None if d_weight is None else (d_weight * upstream).to(ctx.weight_dtype),
            None if d_bias is None else (d_bias * upstream).to(ctx.bias_dtype),
            None,
            None,
            None,
            None,
        )


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    *,
    scale: float = 1.0,
    softcap: float | None = None,
    rows: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum of -log softmax(scale * (hidden weight^T + bias))[target] over rows, and how many rows were right.

    hidden [N, D], weight [V, D], bias [V] or None, targets [N] int64 in [0, V).
    scale: multiplies the logits (Cohere, Granite); softcap: c tanh(z / c) after it (Gemma 2).
    rows: of one chunk; default by `CHUNK_BYTES`.
    Returns (fp32 scalar, differentiable; int64 scalar).  A row whose largest logit is shared counts as right.
    """
    if hidden.shape[0] == 0:
        return hidden.float().sum(), torch.zeros((), dtype=torch.int64, device=hidden.device)
    return _LinearCrossEntropy.apply(hidden, weight, bias, targets, scale, softcap, rows or chunk_rows(weight.shape[0]))


def head_cross_entropy(
    head: Callable[[torch.Tensor], torch.Tensor],
    hidden: torch.Tensor,
    targets: torch.Tensor,
    *,
    vocabulary: int,
    scale: float = 1.0,
    softcap: float | None = None,
    rows: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same for any head that maps [n, D] to [n, V]; each chunk is recomputed in the backward pass."""
    if hidden.shape[0] == 0:
        return hidden.float().sum(), torch.zeros((), dtype=torch.int64, device=hidden.device)

    def chunk_loss(h: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        z = head(h).float() * scale
        if softcap is not None:
            z = softcap * torch.tanh(z / softcap)
        return F.cross_entropy(z, target, reduction="sum"), (z.detach().argmax(dim=-1) == target).sum()

    rows = rows or chunk_rows(vocabulary)
    losses, corrects = [], []
    for start in range(0, hidden.shape[0], rows):
        arguments = hidden[start : start + rows], targets[start : start + rows]
        if torch.is_grad_enabled():
            loss, correct = checkpoint(chunk_loss, *arguments, use_reentrant=False)
        else:
            loss, correct = chunk_loss(*arguments)
        losses.append(loss)
        corrects.append(correct)
    return torch.stack(losses).sum(), torch.stack(corrects).sum()
