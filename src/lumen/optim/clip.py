"""The global gradient norm, and clipping by it."""

from __future__ import annotations

from collections.abc import Iterable

import torch


@torch.no_grad()
def grad_norm(parameters: Iterable[torch.nn.Parameter]) -> torch.Tensor:
    """Euclidean norm of all gradients together: a scalar fp32 tensor, not finite when any gradient is not."""
    grads = [p.grad for p in parameters if p.grad is not None]
    if not grads:
        return torch.zeros(())
    device = grads[0].device
    norms = torch._foreach_norm([g if g.dtype == torch.float32 else g.float() for g in grads])
    return torch.linalg.vector_norm(torch.stack([n.to(device) for n in norms]))


@torch.no_grad()
def scale_grads(parameters: Iterable[torch.nn.Parameter], factor: float) -> None:
    """Multiply every gradient with `factor` in place."""
    grads = [p.grad for p in parameters if p.grad is not None]
    if grads and factor != 1.0:
        torch._foreach_mul_(grads, factor)


def clip_factor(norm: float, max_norm: float) -> float:
    """What to multiply gradients with so that their norm is at most `max_norm`; 1.0 when clipping is off (0)."""
    if max_norm <= 0:
        return 1.0
    return min(1.0, max_norm / (norm + 1e-6))
