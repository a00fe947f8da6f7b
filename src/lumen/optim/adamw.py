"""AdamW and SGD with named fp32 states, on the functional steps of `kernels.reference.optimizer`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from lumen.kernels.reference.optimizer import adamw_step_many, sgd_step_many
from lumen.optim.base import Master, NamedOptimizer, Tensors


class AdamW(NamedOptimizer):
    """Equal to `torch.optim.AdamW` on fp32 parameters (tested); adds masters and names.

    groups: dictionaries with `named_params` and, where they differ from the arguments, `lr` and `weight_decay`.
    lr: step size; betas, eps: as in the paper; weight_decay: decoupled, per step multiplied with lr.
    """

    states = ("exp_avg", "exp_avg_sq")

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        *,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        master: Master = "fp32",
        seed: int = 0,
    ):
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(groups, defaults, master=master, seed=seed)

    def update(self, work: Tensors, grads: Tensors, group: dict[str, Any], params: Tensors) -> None:
        """AdamW on the whole group; one call for all parameters that have made the same number of steps."""
        beta1, beta2 = group["betas"]
        for step in sorted({self.state[p]["step"] for p in params}):
            chosen = [i for i, p in enumerate(params) if self.state[p]["step"] == step]
            adamw_step_many(
                [work[i] for i in chosen],
                [grads[i] for i in chosen],
                [self.state[params[i]]["exp_avg"] for i in chosen],
                [self.state[params[i]]["exp_avg_sq"] for i in chosen],
                lr=group["lr"],
                beta1=beta1,
                beta2=beta2,
                eps=group["eps"],
                weight_decay=group["weight_decay"],
                step=step,
            )


class SGD(NamedOptimizer):
    """Plain gradient descent (HF's `optim: sgd`): no state beside the master."""

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        *,
        lr: float,
        weight_decay: float = 0.0,
        master: Master = "fp32",
        seed: int = 0,
    ):
        super().__init__(groups, {"lr": lr, "weight_decay": weight_decay}, master=master, seed=seed)

    def update(self, work: Tensors, grads: Tensors, group: dict[str, Any], params: Tensors) -> None:
        """SGD on the whole group with one call."""
        sgd_step_many(work, grads, lr=group["lr"], weight_decay=group["weight_decay"])
