"""Recorded and constructed machines: tests/fixtures/machines/*.yaml, each with exactly what the doctor must find.

A fixture says what matters of a machine in a few lines; the files that Linux would show are written from them (as in
`machines.py`), and everything else the doctor looks at (commands, packages, nodes, disks) is taken from it.  Whatever a
fixture leaves out is that of an ordinary, healthy machine.  `python -m tests.helpers.recorded` writes the table of
docs/doctor-machines.md.

    about:        what is special about it, one sentence
    cpu:          model, family, number, threads, flags, per_core, vendor
    memory:       GiB of total and available memory
    kernel:       Linux release
    driver:       version of the amdgpu module ('' in-kernel, null none);  rocm: version of /opt/rocm
    amd:          GPUs: target, cus, vram and gtt (GiB), bus, product, partition, unique
    nvidia:       driver and gpus (model, bus, uuid)
    bus:          devices on the PCI bus: pci, vendor, class, driver
    torch:        rocm7.2, cuda13.0, cpu, null; `version` for another release
    packages, requires, environment, commands, nodes, groups, spaces (GiB), files, absent: as the names say
    expect:       every check that is not ok, with its status
    says:         check → text that its evidence or fix must contain
    device:       what a run takes: cuda:N, cpu, or refused
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from tests.helpers.machines import ZEN3, ZEN4, amd_gpu, memory, put

from lumen.doctor.examine import examine
from lumen.doctor.finding import Case, Finding
from lumen.hardware import View
from lumen.hardware.view import Node, Output, Space

FOLDER = Path(__file__).parents[1] / "fixtures" / "machines"
PAGE = Path(__file__).parents[2] / "docs" / "doctor-machines.md"
FLAGS = {"zen4": ZEN4, "zen3": ZEN3, "zen5": f"{ZEN4} avx_vnni", "skylake": "sse2 avx2 fma f16c", "old": "sse2 avx"}
KEYS = {
    "about", "cpu", "memory", "kernel", "driver", "rocm", "amd", "nvidia", "bus", "torch", "version", "packages",
    "requires", "environment", "commands", "nodes", "groups", "spaces", "files", "absent", "expect", "says", "device",
}  # fmt: skip


@dataclass(frozen=True)
class Recorded:
    """A fixture, its name and its view below a folder."""

    name: str
    values: dict[str, Any]
    view: View


def names() -> list[str]:
    """Every fixture."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def open_machine(name: str, root: Path) -> Recorded:
    """Write a fixture's files below `root` and look at it."""
    values = yaml.safe_load((FOLDER / f"{name}.yaml").read_text())
    assert not set(values) - KEYS, f"{name}: {set(values) - KEYS}"
    _files(root, values)
    environment = {"PATH": "/usr/bin", "HOME": "/home/me", "LOGNAME": "me"} | values.get("environment", {})
    spaces = {"/dev/shm": [16, 16, "tmpfs"], "/": [500, 200, "ext4"]} | values.get("spaces", {})
    nodes = {path: Node(109, 0o660, True) for path in _nodes(values)}
    nodes |= {path: Node(*node) for path, node in values.get("nodes", {}).items()}
    view = View(
        root,
        {key: str(value) for key, value in environment.items()},
        commands={command: _output(said) for command, said in values.get("commands", {}).items()},
        packages=_packages(values),
        requires=values.get("requires", ["triton-rocm==3.7.1"] if "rocm" in str(values.get("torch", "cpu")) else []),
        nodes={path: node for path, node in nodes.items() if path not in values.get("absent", [])},
        groups=values.get("groups", [44, 109, 1000]),
        spaces={path: Space(int(t * 2**30), int(f * 2**30), kind) for path, (t, f, kind) in spaces.items()},
        torch_version=_torch(values),
    )
    return Recorded(name, values, view)


def _output(said: Any) -> Output:
    return Output(said["code"], said["text"]) if isinstance(said, dict) else Output(0, said)


def _nodes(values: dict[str, Any]) -> list[str]:
    found = ["/dev/kfd", *(f"/dev/dri/renderD{128 + i}" for i in range(len(values.get("amd", []))))]
    if not values.get("amd"):
        found = []
    cards = values.get("nvidia", {}).get("gpus", [])
    return (
        found
        + (["/dev/nvidiactl", "/dev/nvidia-uvm"] if cards else [])
        + [f"/dev/nvidia{i}" for i in range(len(cards))]
    )


def _torch(values: dict[str, Any]) -> str:
    kind, version = values.get("torch", "cpu"), values.get("version", "2.13.0")
    if kind is None:
        return ""
    hip = kind.removeprefix("rocm") if kind.startswith("rocm") else None
    cuda = kind.removeprefix("cuda") if kind.startswith("cuda") else None
    return f"__version__ = '{version}+{kind}'\ncuda: Optional[str] = {cuda!r}\nhip: Optional[str] = {hip!r}\n"


def _packages(values: dict[str, Any]) -> dict[str, str]:
    kind = str(values.get("torch", "cpu"))
    usual = {"triton-rocm": "3.7.1"} if kind.startswith("rocm") else {"triton": "3.7.1"} if "cuda" in kind else {}
    return values.get("packages", usual)


def _files(root: Path, values: dict[str, Any]) -> None:
    root.mkdir(parents=True, exist_ok=True)
    cpu = {"model": "AMD EPYC 9654 96-Core Processor", "family": 25, "number": 17, "threads": 16, "flags": "zen4"}
    cpu |= {"per_core": 2, "vendor": "AuthenticAMD"} | values.get("cpu", {})
    blocks = [
        f"processor\t: {i}\nvendor_id\t: {cpu['vendor']}\ncpu family\t: {cpu['family']}\nmodel\t\t: {cpu['number']}\n"
        f"model name\t: {cpu['model']}\nphysical id\t: 0\ncore id\t\t: {i // cpu['per_core']}\n"
        f"flags\t\t: {FLAGS[cpu['flags']]}\n"
        for i in range(cpu["threads"])
    ]
    put(root, "proc/cpuinfo", "\n".join(blocks) + "\n")
    put(root, "proc/self/status", f"Cpus_allowed_list:\t0-{cpu['threads'] - 1}\n")
    memory(root, *values.get("memory", [64, 56]))
    put(root, "proc/version", f"Linux version {values.get('kernel', '6.14.0-29-generic')} (gcc 13.2.0)\n")
    put(root, "proc/cmdline", "root=/dev/nvme0n1p2 ro quiet\n")
    put(root, "etc/group", "root:x:0:\nvideo:x:44:me\nrender:x:109:me\nme:x:1000:\n")
    put(root, "usr/bin/g++", "")
    (root / "usr/bin/g++").chmod(0o755)
    if values.get("amd"):
        _amd(root, values)
    if "nvidia" in values:
        _nvidia(root, values["nvidia"])
    for device in values.get("bus", []):
        folder = f"sys/bus/pci/devices/{device['pci']}"
        put(root, f"{folder}/vendor", f"{device['vendor']:#06x}\n")
        put(root, f"{folder}/class", f"{device['class']:#08x}\n")
        put(root, f"{folder}/device", "0x74a1\n")
        put(root, f"{folder}/uevent", f"DRIVER={device['driver']}\n" if device.get("driver") else "PCI_CLASS=x\n")
    if values.get("rocm"):
        put(root, "opt/rocm/.info/version", f"{values['rocm']}\n")
    for name, text in values.get("files", {}).items():
        put(root, name, text)
    for name in values.get("absent", []):
        (root / name.lstrip("/")).unlink(missing_ok=True)


def _amd(root: Path, values: dict[str, Any]) -> None:
    put(root, "sys/class/kfd/kfd/topology/nodes/0/properties", "cpu_cores_count 16\nsimd_count 0\n")
    if values.get("driver", "6.16.6") is not None:
        put(root, "sys/module/amdgpu/version", f"{values.get('driver', '6.16.6')}\n")
    for i, gpu in enumerate(values["amd"]):
        rdna = gpu["target"] >= 100000
        vram = int(gpu["vram"] * 2**30)
        amd_gpu(
            root, i + 1, gpu["target"], gpu["cus"], vram, gtt=int(gpu.get("gtt", 0) * 2**30), minor=128 + i,
            location=gpu.get("bus", 3 + 0x10 * i) << 8, product=gpu.get("product", ""), simd_per_cu=2 if rdna else 4,
        )  # fmt: skip
        if "unique" in gpu:
            path = root / f"sys/class/kfd/kfd/topology/nodes/{i + 1}/properties"
            path.write_text(path.read_text() + f"unique_id {gpu['unique']}\n")
        if "partition" in gpu:
            put(root, f"sys/class/drm/renderD{128 + i}/device/current_compute_partition", f"{gpu['partition']}\n")
        device = f"sys/class/drm/card{i}/device"
        put(root, f"{device}/mem_info_vram_total", f"{vram}\n")
        put(root, f"{device}/mem_info_vram_used", f"{vram // 50}\n")
        put(root, f"{device}/gpu_busy_percent", "0\n")
        for number, (place, degrees) in enumerate((("edge", 41), ("junction", 48), ("mem", 54)), start=1):
            put(root, f"{device}/hwmon/hwmon{i}/temp{number}_input", f"{degrees}000\n")
            put(root, f"{device}/hwmon/hwmon{i}/temp{number}_label", f"{place}\n")
        put(root, f"{device}/hwmon/hwmon{i}/power1_average", "35000000\n")


def _nvidia(root: Path, nvidia: dict[str, Any]) -> None:
    put(
        root,
        "proc/driver/nvidia/version",
        f"NVRM version: NVIDIA UNIX x86_64 Kernel Module  {nvidia['driver']}  Wed Oct  1 2025\n",
    )
    for gpu in nvidia.get("gpus", []):
        uuid = gpu.get("uuid", "GPU-00000000-0000-0000-0000-000000000000")
        put(
            root,
            f"proc/driver/nvidia/gpus/0000:{gpu['bus']}:00.0/information",
            f"Model: \t\t {gpu['model']}\nGPU UUID: \t {uuid}\nBus Location: \t 0000:{gpu['bus']}:00.0\n",
        )


_written: list[tempfile.TemporaryDirectory[str]] = []


@cache
def findings(name: str) -> tuple[Recorded, list[Finding]]:
    """A fixture and everything the doctor says of it; worked out once in a process."""
    _written.append(tempfile.TemporaryDirectory())
    recorded = open_machine(name, Path(_written[-1].name))
    return recorded, examine(recorded.view)


def device_of(recorded: Recorded) -> str:
    """What a run would take there: cuda:N, cpu, refused, or torch's own finding where files tell nothing (WSL)."""
    choice = Case(recorded.view).choice
    if choice.undecided:
        return "as torch finds"
    return "refused" if choice.problem else "cpu" if choice.index is None else f"cuda:{choice.index}"


def page() -> str:
    """docs/doctor-machines.md."""
    lines = [
        "# Machines that the doctor is tested on",
        "",
        "Generated by `python -m tests.helpers.recorded` from `tests/fixtures/machines`; a test keeps it in step. Each",
        "machine is a short YAML file. The doctor must say of it exactly what stands here: a check that is not listed",
        "is `ok` or does not apply. *Device* is what `device: auto` takes. These machines are constructed from what",
        "Linux, ROCm and the tools print; none was recorded on the hardware itself.",
        "",
        "| machine | what it is | device | broken | warning | note |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name in names():
        recorded, found = findings(name)
        cells = [", ".join(f.check for f in found if f.status == status) for status in ("broken", "warning", "note")]
        lines.append(f"| {name} | {recorded.values['about']} | {device_of(recorded)} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
