"""What a check is and what it says.

A check looks at a `Case` (one machine) and returns a `Result`, or None where it does not apply.  Statuses:

* `ok`       looked at, and right;
* `note`     worth knowing, nothing to repair;
* `warning`  works, but wrong, slow or risky;
* `broken`   a run that needs this will fail; the doctor's exit status is 1.

A *finding* is a warning or something broken.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

from lumen.hardware import Choice, Gpu, Machine, View, choose, probe
from lumen.monitor.telemetry import Telemetry, read_telemetry

OK, NOTE, WARNING, BROKEN = "ok", "note", "warning", "broken"


@dataclass(frozen=True)
class Result:
    """saw: the evidence, what was read and where.  fix: the exact thing to do.  script: shell lines that do it, for
    `--fix`; empty where only a person can."""

    status: str
    saw: str
    fix: str = ""
    script: tuple[str, ...] = ()


@dataclass(frozen=True)
class Check:
    """name: how findings are known.  group: heading of the report.  why: why it matters."""

    name: str
    group: str
    why: str
    look: Callable[[Case], Result | None]


@dataclass(frozen=True)
class Finding:
    """A check's name, group and reason together with what it found on one machine."""

    check: str
    group: str
    status: str
    saw: str
    why: str
    fix: str = ""
    script: tuple[str, ...] = field(default=())

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self) | {"script": list(self.script)}


class Case:
    """One machine under examination: how it is seen, what the probe says of it, which device a run would take.

    seen, carried: the GPUs that torch reports and the architectures it has code for, where torch was asked.
    """

    def __init__(self, view: View, seen: Sequence[Gpu] | None = None, carried: Sequence[str] | None = None):
        self.view, self.seen = view, seen
        self.machine: Machine = probe(view)
        self.choice: Choice = choose(self.machine, seen, carried)

    @property
    def amd(self) -> list[Gpu]:
        """AMD's GPUs that are worth training on."""
        return [gpu for gpu in self.machine.gpus if gpu.vendor == "amd" and gpu.trainable]

    @property
    def nvidia(self) -> list[Gpu]:
        """NVIDIA's GPUs."""
        return [gpu for gpu in self.machine.gpus if gpu.vendor == "nvidia"]

    @property
    def torch_kind(self) -> str:
        """rocm, cuda, cpu, or '' without torch."""
        return self.machine.torch.kind if self.machine.torch else ""

    @property
    def has_amd(self) -> bool:
        """Whether there is any sign of AMD's GPUs or software that is used for them."""
        bus = any(gpu.vendor == "amd" for gpu in self.machine.idle)
        return bool(self.amd) or self.machine.kfd or bus or self.torch_kind == "rocm"

    @cached_property
    def telemetry(self) -> Telemetry:
        """Temperature, power and memory, from whichever source works."""
        return read_telemetry(self.view)

    def variable(self, name: str) -> str:
        """An environment variable, '' where it is not set."""
        return self.view.environment.get(name, "").strip()


def ok(saw: str) -> Result:
    """Looked at, and right."""
    return Result(OK, saw)


def note(saw: str, fix: str = "") -> Result:
    """Worth knowing."""
    return Result(NOTE, saw, fix)


def warning(saw: str, fix: str, *script: str) -> Result:
    """Works, but wrong, slow or risky."""
    return Result(WARNING, saw, fix, script)


def broken(saw: str, fix: str, *script: str) -> Result:
    """A run that needs this will fail."""
    return Result(BROKEN, saw, fix, script)


def gib(size: float) -> str:
    """Bytes as GiB with one decimal."""
    return f"{size / 2**30:.1f} GiB"
