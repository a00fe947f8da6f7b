"""What the codes of a GEMM's operand depend on besides the operand itself.

**Random numbers.**  Stochastic rounding draws from Philox: key (seed, hash of layer name and role), counter (element,
step, micro-step, rank).  The `Clock` of a model says which step it is.  A loop that knows tells it before each forward
pass, whose backward pass comes before the next (`set_step`; Lumen's trainer does).  Then the numbers are a pure
function of the step: a resumed run and a recomputation under checkpointing repeat them bit for bit, with no state to
save.  In a loop that does not, each forward pass of a layer takes its (step, micro-step) from torch's own generator:
every checkpoint of such loops holds that state, and activation checkpointing replays it.

**Histories.**  Delayed and static scales follow from earlier steps (quant.scaling).

All of it enters a layer as tensors, so that one compiled graph serves every layer and step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn

from lumen.core.random import hash_name
from lumen.formats import Noise, QuantSpec
from lumen.quant.plan import LayerPlan
from lumen.quant.scaling import DEFAULT, Delayed, held_scale

NOISE_ROLES = ("weight", "input", "grad_output", "saved_input")


class Clock:
    """Seed, step, micro-step and rank of a model's stochastic rounding, shared by its layers.

    counter: int64 [4] in this order.  told: whether a loop sets step and micro-step.
    """

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed
        self.reset()

    def reset(self) -> None:
        """No step is told yet."""
        self.step, self.told = 0, False
        self.counter = torch.tensor([self.seed, 0, 0, _rank()], dtype=torch.int64)

    def tell(self, step: int, micro_step: int) -> None:
        """From here on it is this step and micro-step.  A new tensor: graphs that are not backward yet keep theirs."""
        self.step, self.told = step, True
        self.counter = torch.tensor([self.seed, step, micro_step, _rank()], dtype=torch.int64)

    def now(self) -> torch.Tensor:
        """The counter of one forward pass."""
        if self.told:
            return self.counter
        drawn = torch.randint(0, 1 << 31, (2,), dtype=torch.int64)
        return torch.cat([self.counter[:1], drawn, self.counter[3:]])


def _rank() -> int:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank()
    return 0


def noise_keys(name: str) -> torch.Tensor:
    """int64 [4]: the hashes of a layer's name with each role."""
    return torch.tensor([hash_name(f"{name}/{role}") for role in NOISE_ROLES], dtype=torch.int64)


def _clocks(model: nn.Module) -> list[Clock]:
    return list({id(c): c for m in model.modules() if isinstance(c := getattr(m, "clock", None), Clock)}.values())


def set_seed(model: nn.Module, seed: int) -> None:
    """The seed of a quantised model's stochastic rounding; before training starts."""
    for clock in _clocks(model):
        clock.seed = seed
        clock.reset()


def set_step(model: nn.Module, step: int, micro_step: int = 0) -> None:
    """Tell a quantised model which optimizer step and micro-step its next forward pass belongs to.

    Nothing happens where no layer rounds stochastically.
    """
    for clock in _clocks(model):
        clock.tell(step, micro_step)


class Live(NamedTuple):
    """None where the layer's plan needs none.

    counter: int64 [4], of `Clock`.  keys: int64 [4], of `noise_keys`.  history: fp32 [3, H], now: fp32 [3], of
    quant.scaling; now is None where nothing is to be collected.  smooth: fp32 [K], of quant.smooth.
    """

    counter: torch.Tensor | None = None
    keys: torch.Tensor | None = None
    history: torch.Tensor | None = None
    now: torch.Tensor | None = None
    smooth: torch.Tensor | None = None
    delayed: Delayed = DEFAULT

    @classmethod
    def of(cls, plan: LayerPlan, tensors: Sequence[torch.Tensor], collect: bool) -> Live:
        """From the plan.num_live tensors of a layer: random numbers, smoothing factors, histories."""
        noise = tensors[:2] if plan.stochastic else (None, None)
        history, now = tensors[-2:] if plan.tracked else (None, None)
        smooth = tensors[2 * plan.stochastic] if plan.smoothed else None
        return cls(noise[0], noise[1], history, now if collect else None, smooth, plan.delayed)

    def noise(self, role: str) -> Noise:
        """The draw for one operand.  A weight rounds alike on every rank and in every micro-step that shares it."""
        if self.counter is None or self.keys is None:  # stored once, outside any step
            return Noise(f"stored/{role}")
        seed, step, micro, rank = self.counter.unbind()
        if role == "weight":
            rank = torch.zeros_like(rank)
        return Noise(self.keys[NOISE_ROLES.index(role)], seed, step, micro, rank)

    def scale(self, x: torch.Tensor, spec: QuantSpec, role: str) -> torch.Tensor | None:
        """The scale of one operand by its history; None where it follows from the operand itself."""
        if spec.scaling == "dynamic":
            return None
        return held_scale(x, spec, role, self.delayed, self.history, self.now)


NOTHING = Live()
