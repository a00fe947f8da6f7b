"""A loss or gradient that is not finite: skip the step, name the first module it comes from, stop after a limit.

Updating with a NaN destroys the weights for good, so the step is skipped.  Why it happened is worth more than that it
did: the micro-batch is run once more with a hook on every module, in the order in which they run, and the first whose
output is not finite though its inputs were is named.  Where the forward pass is finite the backward pass is searched
likewise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from lumen.core.errors import LumenError
from lumen.core.log import warn

NOT_REPEATED = "it did not happen again when the micro-batch was repeated"


def _finite(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return not value.is_floating_point() or bool(torch.isfinite(value).all())
    if isinstance(value, dict):
        return all(_finite(v) for v in value.values())
    if isinstance(value, list | tuple):
        return all(_finite(v) for v in value)
    return True


@contextmanager
def _without_compile() -> Iterator[None]:
    """Compiled layers run as written, so that hooks inside them fire."""
    set_stance = getattr(torch.compiler, "set_stance", None)
    if set_stance is None:
        yield
        return
    with set_stance("force_eager"):
        yield


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


@contextmanager
def _watch(model: nn.Module, hook: Callable[[str, Any, Any, Any], None]) -> Iterator[None]:
    """Call `hook(name, args, kwargs, output)` after every module's forward, inner modules before outer ones."""
    handles = [
        module.register_forward_hook(
            lambda module, args, kwargs, output, name=name or type(module).__name__: hook(name, args, kwargs, output),
            with_kwargs=True,
        )
        for name, module in model.named_modules()
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _forward_culprit(model: nn.Module, run: Callable[[], torch.Tensor]) -> str:
    found: list[str] = []

    def look(name: str, args: Any, kwargs: Any, output: Any) -> None:
        if not found and not _finite(output) and _finite(args) and _finite(kwargs):
            found.append(f"the output of {name}")

    with _watch(model, look):
        loss = run()
    if not found and not _finite(loss.detach()):
        return "the loss itself (every module's output was finite)"
    return found[0] if found else ""


def _backward_culprit(model: nn.Module, run: Callable[[], torch.Tensor]) -> str:
    found: list[str] = []

    def check(name: str, grad: torch.Tensor) -> None:
        if not found and not _finite(grad):
            found.append(f"the gradient at the output of {name}")

    def look(name: str, args: Any, kwargs: Any, output: Any) -> None:
        for tensor in _tensors(output):
            if tensor.requires_grad:
                tensor.register_hook(lambda grad: check(name, grad))

    with _watch(model, look):
        run().backward()
    for name, parameter in reversed(list(model.named_parameters())):
        if not found and parameter.grad is not None and not _finite(parameter.grad):
            found.append(f"the gradient of {name}")
    return found[0] if found else ""


def first_nonfinite_module(model: nn.Module, run: Callable[[], torch.Tensor]) -> str:
    """Where a micro-batch first becomes non-finite, as a phrase that names the module or the weight.

    run: computes the loss of the micro-batch.  Gradients of parameters and random state are left as they were.
    """
    for name, parameter in model.named_parameters():
        if not _finite(parameter.detach()):
            return f"a weight: {name}"
    grads = {parameter: parameter.grad for parameter in model.parameters()}
    try:
        with torch.random.fork_rng(), _without_compile():
            found = _forward_culprit(model, run) or _backward_culprit(model, run)
    finally:
        for parameter, grad in grads.items():
            parameter.grad = grad
    return found or NOT_REPEATED


class Guard:
    """Counts non-finite steps.

    limit: in a row before the run stops.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.in_a_row = 0
        self.skipped = 0

    def good(self) -> None:
        """A step was finite."""
        self.in_a_row = 0

    def bad(self, step: int, what: str, where: str) -> None:
        """A step was not; raises LumenError with advice at the limit.

        what: `loss` or `gradient`.  where: from `first_nonfinite_module`.
        """
        self.in_a_row += 1
        self.skipped += 1
        warn(f"step {step}: the {what} is not finite, first in {where}; the step is skipped")
        if self.in_a_row >= self.limit:
            raise LumenError(
                f"{self.in_a_row} steps in a row had a loss or gradient that is not finite",
                where=f"step {step}, first in {where}",
                fix="lower learning_rate, use bf16 instead of fp16, look at the rows of this step "
                "(lumen data inspect), and check that the base model's weights are whole; the weights were not "
                "touched by these steps, the last checkpoint is good",
            )

    def state(self) -> dict[str, int]:
        """For the checkpoint."""
        return {"in_a_row": self.in_a_row, "skipped": self.skipped}

    def load_state(self, state: dict[str, int]) -> None:
        """Go on from a checkpoint."""
        self.in_a_row, self.skipped = state.get("in_a_row", 0), state.get("skipped", 0)
