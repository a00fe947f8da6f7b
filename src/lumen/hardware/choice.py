"""Which GPU a run takes, why, and what keeps a GPU that is there from being used.

Ranked, most important first: torch has code for it; a discrete card before one that shares the system's memory; how
well torch's wheels carry its architecture; memory; the order in which torch counts.

A GPU that is present but cannot be used is a `Problem` with the fix, never a silent run on the CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lumen.hardware.architectures import ARCHITECTURES
from lumen.hardware.gpus import Gpu, override_arch
from lumen.hardware.probe import Machine
from lumen.hardware.visibility import visible
from lumen.hardware.wheels import install_command

KIND = {"amd": "rocm", "nvidia": "cuda"}
"""Which build of torch drives a vendor's GPUs."""


@dataclass(frozen=True)
class Problem:
    """Why a GPU that is there cannot be used.  check: the doctor's name for it.  fix: the exact thing to do."""

    check: str
    what: str
    fix: str


@dataclass(frozen=True)
class Choice:
    """index: of the GPU as torch counts, None for the CPU.  why: one sentence.  problem: what stands in the way of a
    GPU that is there; a run then refuses unless the CPU was asked for.  undecided: only torch can tell."""

    index: int | None
    gpu: Gpu | None
    why: str
    problem: Problem | None = None
    undecided: bool = False


def vendor_of(machine: Machine) -> str:
    """The vendor whose GPUs the installed torch is built for; for a CPU build that of the GPUs that are there."""
    kind = machine.torch.kind if machine.torch else ""
    built = {"rocm": "amd", "cuda": "nvidia"}.get(kind)
    return built or next((gpu.vendor for gpu in machine.gpus if gpu.trainable), "")


def _support(gpu: Gpu, carried: Sequence[str] | None) -> int:
    """0: torch has code for it, 1: it may, 2: it has none."""
    if carried:
        same_major = gpu.arch.startswith("sm_") and any(name[:-1] == gpu.arch[:-1] for name in carried)
        return 0 if gpu.arch in carried or same_major or not gpu.arch else 2
    facts = ARCHITECTURES.get(gpu.arch)
    return 1 if facts is None else {"yes": 0, "newest": 1}.get(facts.pytorch, 2)


def choose(machine: Machine, seen: Sequence[Gpu] | None = None, carried: Sequence[str] | None = None) -> Choice:
    """The GPU for a run on this machine.

    seen:    the GPUs that torch reports, in its order; None works out from files and variables what it will report.
    carried: the architectures that torch has code for; None goes by the table of what its wheels carry.
    """
    vendor = vendor_of(machine)
    problem = blocked(machine)
    mine = visible(machine.gpus, machine.environment, vendor)
    counted = seen if seen is not None else (() if problem else mine.gpus)
    disguise = override_arch(machine.environment.get("HSA_OVERRIDE_GFX_VERSION", "")) if vendor == "amd" else ""
    ranked = []
    for index, gpu in enumerate(counted):
        support = _support(replace(gpu, arch=disguise) if disguise in ARCHITECTURES else gpu, carried)
        if gpu.trainable:
            ranked.append(((support == 2, gpu.shared_memory, support, -gpu.memory, index), index, gpu))
    if ranked:
        (lacking, *_), index, gpu = min(ranked)
        if lacking and carried:
            problem = Problem(
                "amd-isa" if gpu.vendor == "amd" else "nvidia-isa",
                f"{gpu.name} is {gpu.arch} and this torch has no code for it (it has {', '.join(carried)})",
                no_code_fix(gpu, machine.rocm),
            )
            return Choice(None, None, f"none: {problem.what}", problem)
        others = [(key, other) for key, i, other in ranked if i != index]
        return Choice(index, gpu, _reason(gpu, index, min(ranked)[0], others))
    if mine.on_purpose:
        return Choice(None, None, f"the CPU: {mine.steps[-1]}, so it was meant")
    kind = machine.torch.kind if machine.torch else ""
    if problem is None and seen is not None and (any(gpu.trainable for gpu in mine.gpus) or (machine.dxg and vendor)):
        there = _names(mine.gpus) or "/dev/dxg"
        problem = Problem(
            "wsl" if machine.dxg else "device",
            f"torch is a {kind} build and a GPU is there ({there}), but torch does not see it",
            "run `lumen doctor`; `dmesg | grep -iE 'amdgpu|nvrm|dxg'` shows what the driver says",
        )
    if problem is not None:
        return Choice(None, None, f"none: {problem.what}", problem)
    if idle := [gpu for gpu in machine.gpus if not gpu.trainable]:
        return Choice(None, None, f"the CPU: {_names(idle)} is a display part that no torch carries")
    if machine.dxg and kind in KIND.values() and seen is None:
        return Choice(None, None, "what torch finds behind /dev/dxg: WSL tells nothing of it in files", undecided=True)
    if machine.dxg:
        return Choice(None, None, "the CPU: WSL passes a graphics device on (/dev/dxg), torch is a CPU build")
    return Choice(None, None, "the CPU: no GPU was found")


def no_code_fix(gpu: Gpu, rocm: str) -> str:
    """What to do where torch has no code for a GPU."""
    facts = ARCHITECTURES.get(gpu.arch)
    if facts is not None and facts.override:
        return f"export HSA_OVERRIDE_GFX_VERSION={facts.override}, or {install_command(gpu.vendor, gpu.arch, rocm)}"
    return install_command(gpu.vendor, gpu.arch, rocm)


def _names(gpus: Sequence[Gpu]) -> str:
    names = [gpu.name for gpu in gpus]
    counts = {name: names.count(name) for name in dict.fromkeys(names)}
    return ", ".join(name if count == 1 else f"{count} x {name}" for name, count in counts.items())


_Key = tuple[bool, bool, int, int, int]


def _reason(gpu: Gpu, index: int, key: _Key, others: Sequence[tuple[_Key, Gpu]]) -> str:
    """The first criterion of the ranking by which it beats all others, in words."""
    text, names = f"cuda:{index}, {gpu.name}", _names([other for _, other in others])
    if not others:
        return f"{text}: the only GPU that torch sees"
    if all(other[1] and not key[1] for other, _ in others):
        return f"{text}: a discrete card comes before {names}, which shares the system's memory"
    if all(other[2] > key[2] for other, _ in others):
        return f"{text}: torch carries its architecture {gpu.arch} better than {names}"
    if all(other[3] > key[3] for other, _ in others):
        return f"{text}: it has more memory ({gpu.memory / 2**30:.0f} GiB) than {names}"
    return f"{text}: the best of {len(others) + 1}, and the first among equals"


def blocked(machine: Machine) -> Problem | None:
    """What keeps this machine's GPUs from being used, most basic first; None where nothing does or there is none.

    Driver, device nodes, torch's build, visibility: the order in which a person has to repair them.
    """
    present = [gpu for gpu in machine.gpus if gpu.trainable]
    accelerators = [gpu for gpu in machine.idle if gpu.accelerator]
    if not present and accelerators and not machine.wsl:
        first = accelerators[0]
        tool = "amdgpu" if first.vendor == "amd" else "nvidia"
        return Problem(
            f"{first.vendor}-driver",
            f"{len(accelerators)} {first.vendor.upper()} accelerator(s) are on the bus ({first.pci}) and no driver "
            f"that computes is bound to them ({first.driver or 'none'})",
            f"sudo modprobe {tool}; if that fails, install the {tool} driver",
        )
    unknown_kfd = machine.kfd and not machine.gpus and not machine.wsl
    if not present and not unknown_kfd:
        return None
    vendors = {gpu.vendor for gpu in present} or {"amd"}
    kind = machine.torch.kind if machine.torch else ""
    if kind not in {KIND[name] for name in vendors}:
        arch = next((gpu.arch for gpu in present if gpu.vendor == "amd"), "")
        which = "amd" if "amd" in vendors else "nvidia"
        what = _names(present) if present else "/dev/kfd"
        said = f"torch {machine.torch.version} is a {kind} build" if machine.torch else "torch is not installed"
        return Problem(
            "torch", f"{what} is there, but {said} and cannot use it", install_command(which, arch, machine.rocm)
        )
    nodes = nodes_problem(machine)
    if nodes is not None:
        return nodes
    mine = visible(machine.gpus, machine.environment, vendor_of(machine))
    if present and not mine.gpus and not mine.on_purpose:
        return Problem(
            "visibility",
            f"the visibility variables leave no GPU: {'; '.join(mine.steps)}",
            "keep one of them and count from 0: unset ROCR_VISIBLE_DEVICES HIP_VISIBLE_DEVICES CUDA_VISIBLE_DEVICES",
        )
    return None


def nodes_problem(machine: Machine) -> Problem | None:
    """Device nodes that are missing or closed to this process."""
    vendor = "amd" if any(gpu.vendor == "amd" for gpu in machine.gpus) or machine.kfd else "nvidia"
    if machine.closed_nodes:
        groups = "--group-add $(stat -c %g /dev/kfd) --group-add $(stat -c %g /dev/dri/renderD128)"
        fix = {
            ("amd", True): f"start the container with --device=/dev/kfd --device=/dev/dri {groups} --ipc=host",
            ("amd", False): "sudo usermod -aG render,video $LOGNAME, then log in again",
        }.get((vendor, machine.container), "sudo chmod 666 /dev/nvidia*, or start the container with --gpus all")
        names = ", ".join(machine.closed_nodes)
        return Problem(f"{vendor}-nodes", f"this process may not open {names}", fix)
    if vendor == "amd" and machine.gpus and not machine.kfd and not machine.wsl:
        if machine.container:
            fix = "start the container with --device=/dev/kfd --device=/dev/dri --group-add GID-OF-/dev/kfd --ipc=host"
        else:
            fix = "sudo modprobe amdgpu; ls -l /dev/kfd"
        return Problem("amd-nodes", "the kernel knows the GPU, but there is no /dev/kfd here", fix)
    return None
