"""Which code runs an operation: a table, and one way to choose from it.

An entry says for which operation, targets and formats a backend is meant, how it ranks and why it is there.  A *target*
is an architecture by name: `cpu`, `gfx942`, `sm_90`.  Names, because numbers lie: gfx1100 reports capability 11.0, and
FP8 dialects follow the name.  `select` takes the best entry that fits and can run; where none fits it raises and lists
what exists.  `kind` is what a report may call the result: `native` (the chip's own units for the format), `emulated`
(the same numbers through a wider type).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch

from lumen.core import QuantError


@dataclass(frozen=True)
class Kernel:
    """One way to run one operation.

    op:        the operation, e.g. `int8_matmul`.
    backend:   who computes it: `reference`, `torch`, later `cpu` (C++), `triton`, `vendor`.
    targets:   globs on architecture names.
    formats:   the operand formats it takes.
    priority:  the highest that fits and can run is chosen.
    kind:      `native` or `emulated`.
    why:       one line for the reader of `lumen kernels`.
    run:       the function.
    missing:   returns why it cannot run here, or an empty string.
    """

    op: str
    backend: str
    targets: tuple[str, ...]
    formats: tuple[str, ...]
    priority: int
    kind: str
    why: str
    run: Callable[..., Any]
    missing: Callable[[], str] = lambda: ""

    def fits(self, target: str, fmt: str) -> bool:
        return fmt in self.formats and any(fnmatchcase(target, glob) for glob in self.targets)


_KERNELS: list[Kernel] = []
_chosen: dict[tuple[str, str, str], Kernel] = {}


def register(kernel: Kernel) -> Kernel:
    """Add one entry.  A second entry of the same operation, backend and targets is a mistake in the code."""
    key = (kernel.op, kernel.backend, kernel.targets)
    assert key not in {(k.op, k.backend, k.targets) for k in _KERNELS}, key
    _KERNELS.append(kernel)
    _chosen.clear()
    return kernel


def table() -> list[Kernel]:
    """All entries, by operation, best first."""
    return sorted(_KERNELS, key=lambda k: (k.op, -k.priority))


def select(op: str, target: str, fmt: str) -> Kernel:
    """The best kernel for an operation on a target.  Raises QuantError that lists what exists."""
    if (op, target, fmt) in _chosen:
        return _chosen[op, target, fmt]
    fitting = [k for k in table() if k.op == op and k.fits(target, fmt)]
    for kernel in fitting:
        if not kernel.missing():
            _chosen[op, target, fmt] = kernel
            return kernel
    known = [f"{k.backend} ({', '.join(k.targets)}; {', '.join(k.formats)})" for k in table() if k.op == op]
    reasons = [f"{k.backend}: {k.missing()}" for k in fitting]
    raise QuantError(
        f"no kernel runs {op} in {fmt} on {target}",
        where="; ".join(reasons),
        fix=f"{op} has: {'; '.join(known)}" if known else f"operations: {', '.join(sorted({k.op for k in _KERNELS}))}",
    )


def target_of(device: torch.device | str) -> str:
    """The architecture name of a torch device: `cpu`, `gfx942`, `sm_90`; other devices give their type."""
    device = torch.device(device)
    if device.type != "cuda":
        return device.type
    properties = torch.cuda.get_device_properties(device)
    name = getattr(properties, "gcnArchName", "")
    if torch.version.hip and name:
        return str(name).partition(":")[0]
    return f"sm_{properties.major}{properties.minor}"


_trace: list[tuple[str, str, str]] | None = None


@contextmanager
def trace() -> Iterator[list[tuple[str, str, str]]]:
    """Collect (operation, format, backend) of every kernel call in the block: what ran, not what was asked for.

    Calls inside compiled graphs are not seen.
    """
    global _trace
    before, _trace = _trace, []
    try:
        yield _trace
    finally:
        _trace = before


def record(op: str, fmt: str, backend: str) -> None:
    """Called by operations when they run."""
    if _trace is not None:
        _trace.append((op, fmt, backend))
