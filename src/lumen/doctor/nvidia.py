"""NVIDIA GPUs: driver, device nodes, driver against torch's CUDA, architecture, telemetry."""

from __future__ import annotations

import re

from lumen.doctor.finding import Case, Check, Result, broken, note, ok, warning
from lumen.hardware.choice import nodes_problem

OLDEST_DRIVER = {11: 450, 12: 525, 13: 580}
"""The oldest Linux driver for each CUDA major version. [S: NVIDIA's page on CUDA compatibility]"""


def _driver_version(case: Case) -> str:
    match = re.search(r"Kernel Module\s+(?:for \S+\s+)?(\d+(?:\.\d+)+)", case.view.read("/proc/driver/nvidia/version"))
    return match[1] if match else ""


def driver(case: Case) -> Result | None:
    """The kernel driver, and whether it is new enough for torch's CUDA."""
    idle = [gpu for gpu in case.machine.idle if gpu.vendor == "nvidia"]
    version = _driver_version(case)
    if not version:
        if not idle or case.machine.wsl:
            return None
        bound = f"bound to {idle[0].driver}" if idle[0].driver else "without a driver"
        text = f"{len(idle)} NVIDIA GPU(s) on the bus ({idle[0].pci}), {bound}; no /proc/driver/nvidia/version"
        fix = "install NVIDIA's driver (580 or later for CUDA 13), then reboot"
        return (broken if any(gpu.accelerator for gpu in idle) else warning)(text, fix)
    text = f"driver {version} (/proc/driver/nvidia/version)"
    torch = case.machine.torch
    if torch is None or torch.kind != "cuda":
        return ok(text)
    major = int(torch.toolkit.partition(".")[0] or 0)
    oldest = OLDEST_DRIVER.get(major, 0)
    text += f"; torch is built for CUDA {torch.toolkit}"
    if int(version.partition(".")[0]) < oldest:
        return broken(
            f"{text}, which needs driver {oldest} or later",
            f"upgrade the driver to {oldest}, or install a torch for an older CUDA: "
            "pip install torch --index-url https://download.pytorch.org/whl/cu126",
        )
    return ok(text)


def nodes(case: Case) -> Result | None:
    """/dev/nvidia*: there, and open to this process."""
    if not case.nvidia:
        return None
    names = ["/dev/nvidiactl", "/dev/nvidia-uvm", *(f"/dev/nvidia{gpu.index}" for gpu in case.nvidia)]
    missing = [name for name in names if case.view.node(name) is None]
    closed = [name for name in names if (node := case.view.node(name)) is not None and not node.usable]
    if closed:
        problem = nodes_problem(case.machine)
        return broken(f"closed to this process: {', '.join(closed)}", problem.fix if problem else "open them")
    if missing:
        inside = "start the container with --gpus all" if case.machine.container else "sudo nvidia-modprobe -u -c=0"
        return broken(f"missing: {', '.join(missing)}", inside)
    return ok(f"{', '.join(names[:3])} and {len(names) - 3} more" if len(names) > 3 else ", ".join(names))


def isa(case: Case) -> Result | None:
    """The architectures, by model."""
    if not case.nvidia:
        return None
    text = ", ".join(dict.fromkeys(f"{gpu.name} ({gpu.arch or 'architecture unknown'})" for gpu in case.nvidia))
    unknown = [gpu.name for gpu in case.nvidia if not gpu.arch]
    if unknown:
        return note(f"{text}; not in Lumen's table, torch tells its architecture when it runs")
    return ok(f"{text} (/proc/driver/nvidia/gpus)")


def telemetry(case: Case) -> Result | None:
    """nvidia-smi."""
    if not case.nvidia:
        return None
    found = case.telemetry
    if found.source != "nvidia-smi":
        return warning(f"unavailable: {found.tried[-1]}", "install nvidia-utils of the driver's version")
    hot = max((r.temperature for r in found.readings if r.temperature is not None), default=None)
    text = f"nvidia-smi: {len(found.readings)} GPU(s)" + (f", hottest {hot:.0f} °C" if hot is not None else "")
    errors = sum(r.ecc or 0 for r in found.readings)
    if errors:
        return warning(
            f"{text}; {errors} uncorrectable memory errors", "nvidia-smi -q -d ECC; reset or replace the GPU"
        )
    return ok(text)


CHECKS = (
    Check("nvidia-driver", "nvidia", "a driver older than torch's CUDA sees no GPU", driver),
    Check("nvidia-nodes", "nvidia", "a closed or missing node looks like no GPU at all", nodes),
    Check("nvidia-isa", "nvidia", "kernels and FP8 go by the architecture", isa),
    Check("nvidia-telemetry", "nvidia", "the thermal guard and the monitor read it", telemetry),
)
