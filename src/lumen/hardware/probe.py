"""What this machine is, read from files below a root that can be any folder.

Nothing is asked of a driver and no GPU is started: Linux describes its hardware in /proc and /sys.  So the probe takes
milliseconds, works where torch is broken or missing, and a test gives it a recorded tree and sees an MI300X.

* CPU: /proc/cpuinfo, the affinity mask of /proc/self/status and the quota of the control group.
* Memory: /proc/meminfo, capped by the control group (a container's limit is what kills a run, not the machine's size).
* AMD GPUs: the KFD topology, whose `gfx_target_version` is the true instruction set, whatever an override pretends.
* NVIDIA GPUs: /proc/driver/nvidia.
* torch: the text of its version file; it is not imported.

A discrete GPU comes before one that shares the system's memory (`Machine.preferred`), whatever their order.
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lumen.hardware import chips, cpus
from lumen.hardware.architectures import ARCHITECTURES

AMD_VENDOR = 0x1002

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
class Gpu:
    """One GPU.

    index:  its place among the GPUs of its vendor, as the runtime counts without visibility variables.
    memory: bytes of its own memory; for one that shares the system's, what the driver lets it take.
    chip:   name in the chip table, '' where it is not clear which product it is.
    pci:    bus address, '' where not told.
    """

    vendor: str
    index: int
    arch: str
    name: str
    memory: int
    shared_memory: bool = False
    compute_units: int = 0
    chip: str = ""
    pci: str = ""
    render_node: str = ""


@dataclass(frozen=True)
class Torch:
    """An installed torch: version, what it was built for (`rocm`, `cuda`, `cpu`), and that toolkit's version."""

    version: str
    kind: str
    toolkit: str = ""


@dataclass(frozen=True)
class Machine:
    """Everything the probe found.  `environment` holds only the variables of `TELLING` that are set."""

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

    @property
    def preferred(self) -> Gpu | None:
        """The GPU to train on: discrete before shared, then the one with most memory; None without GPUs."""
        return _best(self.gpus)

    @property
    def usable(self) -> Gpu | None:
        """The best GPU that the installed torch is built for, or None."""
        vendor = {"rocm": "amd", "cuda": "nvidia"}.get(self.torch.kind if self.torch else "")
        return _best(gpu for gpu in self.gpus if gpu.vendor == vendor)

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON (the hardware report of a run, `lumen hardware --json`)."""
        values = asdict(self)
        values["cpu"]["flags"] = sorted(self.cpu.flags & INTERESTING_FLAGS)
        values["preferred_gpu"] = self.gpus.index(self.preferred) if self.preferred else None
        return values


def _best(gpus: Iterable[Gpu]) -> Gpu | None:
    return min(gpus, key=lambda gpu: (gpu.shared_memory, -gpu.memory, gpu.index), default=None)


INTERESTING_FLAGS = frozenset({flag for row in cpus.MICROARCHITECTURES.values() for flag in row.features}) | {
    "bf16",
    "i8mm",
    "asimd",
}


def read(path: Path) -> str:
    """A file's text, or '' where it cannot be read: absence is an answer here, not an error."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _number(text: str, default: int = 0) -> int:
    try:
        return int(text.strip().split()[0], 0)
    except (ValueError, IndexError):
        return default


def _pairs(text: str, separator: str | None = None) -> dict[str, str]:
    """`key value` or `key: value` lines as a dict; the first of equal keys stays."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        key, _, value = line.partition(separator) if separator else line.partition(" ")
        if key.strip():
            found.setdefault(key.strip(), value.strip())
    return found


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
    blocks = [_pairs(block, ":") for block in text.split("\n\n") if block.strip()]
    if not blocks:
        return Cpu(threads=os.cpu_count() or 1)
    first = blocks[0]
    vendor = first.get("vendor_id", "")
    cores = {(block.get("physical id", "0"), block["core id"]) for block in blocks if "core id" in block}
    threads = _list_length(_pairs(read(root / "proc/self/status"), ":").get("Cpus_allowed_list", "")) or len(blocks)
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
            vendor, _number(first.get("cpu family", "")), _number(first.get("model", ""))
        ),
        cores=len(cores) or len(blocks),
        threads=threads,
        flags=frozenset((first.get("flags") or first.get("Features", "")).split()),
    )


def probe_memory(root: Path) -> Memory:
    """Main memory: the machine's, or what the control group leaves of it."""
    values = _pairs(read(root / "proc/meminfo"), ":")
    total = _number(values.get("MemTotal", "")) * 1024
    available = _number(values.get("MemAvailable", values.get("MemFree", ""))) * 1024
    limit = "machine"
    for folder in _group_folders(root, "memory"):
        most = read(folder / "memory.max").strip() or read(folder / "memory.limit_in_bytes").strip()
        if not most.isdigit() or int(most) >= (total or 1 << 62):
            continue
        used = _number(read(folder / "memory.current") or read(folder / "memory.usage_in_bytes"))
        # Pages of files that are only cached are given back on demand: not in use.
        cached = _number(_pairs(read(folder / "memory.stat")).get("inactive_file", ""))
        total, limit = int(most), "control group"
        available = min(available, max(0, total - max(0, used - cached)))
    return Memory(total, available, limit)


def probe_gpus(root: Path) -> tuple[Gpu, ...]:
    """All GPUs that can compute: AMD's by the KFD topology, NVIDIA's by their driver's files."""
    return (*_amd_gpus(root), *_nvidia_gpus(root))


def gfx_name(target_version: int) -> str:
    """KFD's decimal gfx_target_version as an architecture name: 90402 gfx942, 90010 gfx90a, 110501 gfx1151."""
    major, minor, stepping = target_version // 10000, target_version // 100 % 100, target_version % 100
    return f"gfx{major}{minor:x}{stepping:x}"


def _amd_gpus(root: Path) -> list[Gpu]:
    found: list[Gpu] = []
    nodes = root / "sys/class/kfd/kfd/topology/nodes"
    for node in sorted(nodes.glob("*"), key=lambda path: _number(path.name)):
        properties = _pairs(read(node / "properties"))
        target = _number(properties.get("gfx_target_version", ""))
        if not target:
            continue
        arch = gfx_name(target)
        render = f"renderD{_number(properties.get('drm_render_minor', ''))}"
        device = root / "sys/class/drm" / render / "device"
        banks = [_pairs(read(path)) for path in node.glob("mem_banks/*/properties")]
        own = sum(_number(bank.get("size_in_bytes", "")) for bank in banks if bank.get("heap_type") in ("1", "2"))
        memory = _number(read(device / "mem_info_vram_total")) or own
        facts = ARCHITECTURES.get(arch)
        shared = bool(facts and facts.shared_memory)
        if shared:
            memory += _number(read(device / "mem_info_gtt_total"))
        units = _number(properties.get("simd_count", "")) // max(1, _number(properties.get("simd_per_cu", ""), 1))
        product = read(device / "product_name").strip()
        chip = chips.match_chip(product) if product else None
        chip = chip or chips.identify(arch, units, memory)
        location = _number(properties.get("location_id", ""))
        domain = _number(properties.get("domain", ""))
        found.append(
            Gpu(
                vendor="amd",
                index=len(found),
                arch=arch,
                name=product or (f"AMD {chip.name}" if chip else f"AMD GPU ({arch}, {units} CUs)"),
                memory=memory,
                shared_memory=shared,
                compute_units=units,
                chip=chip.name if chip else "",
                pci=f"{domain:04x}:{location >> 8:02x}:{location >> 3 & 31:02x}.{location & 7}" if location else "",
                render_node=render if device.exists() else "",
            )
        )
    return found


def _nvidia_gpus(root: Path) -> list[Gpu]:
    found: list[Gpu] = []
    for folder in sorted((root / "proc/driver/nvidia/gpus").glob("*")):
        values = _pairs(read(folder / "information"), ":")
        name = values.get("Model", "NVIDIA GPU")
        chip = chips.match_chip(name)
        found.append(
            Gpu(
                vendor="nvidia",
                index=len(found),
                arch=chip.arch if chip else "",
                name=name,
                memory=int(chip.memory_gb * 1e9) if chip else 0,
                compute_units=chip.cus if chip else 0,
                chip=chip.name if chip else "",
                pci=folder.name,
            )
        )
    return found


def parse_torch(version_py: str) -> Torch | None:
    """What torch/version.py says, as text; None where it names no version."""

    def value(name: str) -> str:
        match = re.search(rf"^{name}\b[^=\n]*=\s*['\"]([^'\"]*)['\"]", version_py, re.MULTILINE)
        return match[1] if match else ""

    if not (version := value("__version__")):
        return None
    hip, cuda = value("hip"), value("cuda")
    return Torch(version, "rocm" if hip else "cuda" if cuda else "cpu", hip or cuda)


def _torch_version_file() -> str:
    spec = importlib.util.find_spec("torch")
    return read(Path(spec.origin).with_name("version.py")) if spec and spec.origin else ""


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
    root: Path | str = "/", environment: Mapping[str, str] | None = None, torch_version: str | None = None
) -> Machine:
    """What the machine below `root` is.

    environment:   the variables to look at (default: this process's).
    torch_version: text of torch/version.py (default: of the torch that this interpreter would import; '' for none).
    """
    root = Path(root)
    environment = os.environ if environment is None else environment
    release = next(
        (text for name in ("opt/rocm/.info/version", "opt/rocm/core/.info/version") if (text := read(root / name))), ""
    )
    driver = root / "sys/module/amdgpu"
    return Machine(
        cpu=probe_cpu(root),
        memory=probe_memory(root),
        gpus=probe_gpus(root),
        torch=parse_torch(_torch_version_file() if torch_version is None else torch_version),
        compiler=find_compiler(root, environment),
        rocm=release.strip(),
        kernel_driver=(read(driver / "version").strip() or "in-kernel") if driver.exists() else "",
        kfd=(root / "dev/kfd").exists(),
        wsl=(root / "dev/dxg").exists() or "microsoft" in read(root / "proc/version").lower(),
        environment={name: environment[name] for name in TELLING if name in environment},
    )
