"""What this machine is, read through a `View`, which can be of any machine.

Nothing is asked of a driver and no GPU is started: Linux describes its hardware in /proc and /sys.  So the probe takes
milliseconds, works where torch is broken or missing, and a test gives it a recorded tree and sees an MI300X.

* CPU: /proc/cpuinfo, the affinity mask of /proc/self/status and the quota of the control group.
* Memory: /proc/meminfo, capped by the control group (a container's limit is what kills a run, not the machine's size).
* AMD GPUs: the KFD topology, whose `gfx_target_version` is the true instruction set, whatever an override pretends.
* NVIDIA GPUs: /proc/driver/nvidia.
* torch: the text of its version file; it is not imported.

Which GPU a run takes is decided in `choice`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lumen.hardware import cpus
from lumen.hardware.gpus import BusGpu, Gpu, amd_gpus, bus_gpus, nvidia_gpus
from lumen.hardware.text import number, pairs
from lumen.hardware.view import View, read

# Environment variables that change which GPU is seen, or what it pretends to be.
TELLING = (
    "HSA_OVERRIDE_GFX_VERSION",
    "HIP_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "CUDA_VISIBLE_DEVICES",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_HIP_ALLOC_CONF",
    "PYTORCH_ALLOC_CONF",
    "TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL",
    "OMP_NUM_THREADS",
    "GOMP_SPINCOUNT",
)


@dataclass(frozen=True)
class Cpu:
    """model: as the processor names itself.  microarchitecture: '' where unknown.  cores: physical.  threads: what
    this process may use (affinity and quota).  flags: instruction sets, as Linux names them."""

    model: str = "unknown"
    vendor: str = ""
    microarchitecture: str = ""
    cores: int = 1
    threads: int = 1
    flags: frozenset[str] = frozenset()

    @property
    def bf16(self) -> bool:
        """Whether the core multiplies bf16 numbers itself."""
        return bool(self.flags & {"avx512_bf16", "amx_bf16", "bf16"})

    @property
    def int8(self) -> bool:
        """Whether the core has int8 dot products."""
        return bool(self.flags & {"avx512_vnni", "avx_vnni", "amx_int8", "i8mm"})


@dataclass(frozen=True)
class Memory:
    """Bytes.  limit: 'machine', or 'control group' where a container's limit is smaller than the machine."""

    total: int = 0
    available: int = 0
    limit: str = "machine"


@dataclass(frozen=True)
class Torch:
    """An installed torch: version, what it was built for (`rocm`, `cuda`, `cpu`), and that toolkit's version."""

    version: str
    kind: str
    toolkit: str = ""


@dataclass(frozen=True)
class Machine:
    """Everything the probe found.

    environment:  only the variables of `TELLING` that are set.
    kernel:       Linux release.
    closed_nodes: device nodes of GPUs that exist and that this process may not open.
    idle:         AMD and NVIDIA GPUs on the bus that have no driver to compute with.
    dxg:          the device through which WSL passes GPUs on.
    """

    cpu: Cpu
    memory: Memory
    gpus: tuple[Gpu, ...] = ()
    torch: Torch | None = None
    compiler: str = ""
    rocm: str = ""
    kernel_driver: str = ""
    kfd: bool = False
    wsl: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)
    kernel: str = ""
    container: bool = False
    closed_nodes: tuple[str, ...] = ()
    idle: tuple[BusGpu, ...] = ()
    dxg: bool = False

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON (the hardware report of a run, `lumen hardware --json`)."""
        values = asdict(self)
        values["cpu"]["flags"] = sorted(self.cpu.flags & INTERESTING_FLAGS)
        return values


INTERESTING_FLAGS = frozenset({flag for row in cpus.MICROARCHITECTURES.values() for flag in row.features}) | {
    "bf16",
    "i8mm",
    "asimd",
}


def _list_length(text: str) -> int:
    """Length of a kernel list: `0-3,8` has five members."""
    total = 0
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first.strip().isdigit():
            total += int(last or first) - int(first) + 1
    return total


def _group_folders(root: Path, controller: str) -> list[Path]:
    """The control-group folders of this process for one controller, from its own up to the top (version 1 or 2)."""
    base, path = root / "sys/fs/cgroup", "/"
    for line in read(root / "proc/self/cgroup").splitlines():
        _, controllers, own = line.split(":", 2)
        if controllers == "":
            path = own
        elif controller in controllers.split(","):
            base, path = root / "sys/fs/cgroup" / controller, own
            break
    folders = [base]
    for part in Path(path.lstrip("/")).parts:
        folders.append(folders[-1] / part)
    return folders[::-1]


def probe_cpu(root: Path) -> Cpu:
    """The processor, and how much of it this process may use."""
    text = read(root / "proc/cpuinfo")
    blocks = [pairs(block, ":") for block in text.split("\n\n") if block.strip()]
    if not blocks:
        return Cpu(threads=os.cpu_count() or 1)
    first = blocks[0]
    vendor = first.get("vendor_id", "")
    cores = {(block.get("physical id", "0"), block["core id"]) for block in blocks if "core id" in block}
    threads = _list_length(pairs(read(root / "proc/self/status"), ":").get("Cpus_allowed_list", "")) or len(blocks)
    for folder in _group_folders(root, "cpu"):
        quota, _, period = read(folder / "cpu.max").strip().partition(" ")
        if not quota:
            quota, period = (read(folder / name).strip() for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us"))
        if quota.isdigit() and period.isdigit():
            threads = min(threads, max(1, int(quota) // int(period)))
    return Cpu(
        model=first.get("model name", first.get("Processor", "unknown")),
        vendor=vendor,
        microarchitecture=cpus.microarchitecture(
            vendor, number(first.get("cpu family", "")), number(first.get("model", ""))
        ),
        cores=len(cores) or len(blocks),
        threads=threads,
        flags=frozenset((first.get("flags") or first.get("Features", "")).split()),
    )


def probe_memory(root: Path) -> Memory:
    """Main memory: the machine's, or what the control group leaves of it."""
    values = pairs(read(root / "proc/meminfo"), ":")
    total = number(values.get("MemTotal", "")) * 1024
    available = number(values.get("MemAvailable", values.get("MemFree", ""))) * 1024
    limit = "machine"
    for folder in _group_folders(root, "memory"):
        most = read(folder / "memory.max").strip() or read(folder / "memory.limit_in_bytes").strip()
        if not most.isdigit() or int(most) >= (total or 1 << 62):
            continue
        used = number(read(folder / "memory.current") or read(folder / "memory.usage_in_bytes"))
        # Pages of files that are only cached are given back on demand: not in use.
        cached = number(pairs(read(folder / "memory.stat")).get("inactive_file", ""))
        total, limit = int(most), "control group"
        available = min(available, max(0, total - max(0, used - cached)))
    return Memory(total, available, limit)


def parse_torch(version_py: str) -> Torch | None:
    """What torch/version.py says, as text; None where it names no version."""

    def value(name: str) -> str:
        match = re.search(rf"^{name}\b[^=\n]*=\s*['\"]([^'\"]*)['\"]", version_py, re.MULTILINE)
        return match[1] if match else ""

    if not (version := value("__version__")):
        return None
    hip, cuda = value("hip"), value("cuda")
    return Torch(version, "rocm" if hip else "cuda" if cuda else "cpu", hip or cuda)


def find_compiler(root: Path, environment: Mapping[str, str]) -> str:
    """Path of a C++ compiler as the environment names it (CXX, then c++, g++, clang++ on PATH), or ''."""
    names = [environment["CXX"].split()[0]] if environment.get("CXX", "").strip() else []
    for name in (*names, "c++", "g++", "clang++"):
        for folder in [""] if name.startswith("/") else environment.get("PATH", "").split(":"):
            path = root / folder.lstrip("/") / name.lstrip("/")
            if path.is_file() and os.access(path, os.X_OK):
                return f"/{path.relative_to(root)}"
    return ""


def probe(
    source: View | Path | str = "/", environment: Mapping[str, str] | None = None, torch_version: str | None = None
) -> Machine:
    """What a machine is.

    source:        how it is looked at; a folder means the machine whose files lie below it.
    environment:   the variables to look at (default: this process's).
    torch_version: text of torch/version.py (default: of the torch that this interpreter would import; '' for none).
    """
    view = source if isinstance(source, View) else View(source, environment, torch_version=torch_version)
    root, environment = view.root, view.environment
    release = view.read("/opt/rocm/.info/version") or view.read("/opt/rocm/core/.info/version")
    driver = "/sys/module/amdgpu"
    version = view.read("/proc/version")
    kernel = match[1] if (match := re.search(r"Linux version (\S+)", version)) else ""
    gpus = (*amd_gpus(view, kernel), *nvidia_gpus(view))
    return Machine(
        cpu=probe_cpu(root),
        memory=probe_memory(root),
        gpus=gpus,
        torch=parse_torch(view.torch_version_text()),
        compiler=find_compiler(root, environment),
        rocm=release,
        kernel_driver=(view.read(f"{driver}/version") or "in-kernel") if view.exists(driver) else "",
        kfd=view.exists("/dev/kfd"),
        wsl=view.exists("/dev/dxg") or "microsoft" in version.lower(),
        environment={name: environment[name] for name in TELLING if name in environment},
        kernel=kernel,
        container=view.container,
        closed_nodes=_closed_nodes(view, gpus),
        idle=tuple(gpu for gpu in bus_gpus(view) if gpu.driver not in ("amdgpu", "nvidia")),
        dxg=view.exists("/dev/dxg"),
    )


def _closed_nodes(view: View, gpus: Iterable[Gpu]) -> tuple[str, ...]:
    """Device nodes that computing needs, that are there, and that this process may not read and write."""
    names = []
    for gpu in gpus:
        if gpu.vendor == "amd":
            names += ["/dev/kfd", f"/dev/dri/{gpu.render_node}"] if gpu.render_node else ["/dev/kfd"]
        else:
            names += ["/dev/nvidiactl", "/dev/nvidia-uvm", f"/dev/nvidia{gpu.index}"]
    if not names and view.exists("/dev/kfd"):
        names = ["/dev/kfd"]
    return tuple(name for name in dict.fromkeys(names) if (node := view.node(name)) is not None and not node.usable)
