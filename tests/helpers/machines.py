"""Machines as folders: the files of /proc, /sys and /opt that describe one, written for a test.

`machine(tmp_path, "mi300x")` gives a root for `lumen.hardware.probe` and for scripts/setup_torch.py.  Contents follow
what Linux prints (KFD topology, cgroup v1 and v2, the NVIDIA driver), shortened to the lines that are read and a few
that are not.
"""

from __future__ import annotations

from pathlib import Path

ROCM_TORCH = (
    "__version__ = '2.13.0+rocm7.2'\ndebug = False\ncuda: Optional[str] = None\nhip: Optional[str] = '7.2.53211'\n"
)
CUDA_TORCH = "__version__ = '2.13.0+cu130'\ncuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n"
CPU_TORCH = "__version__ = '2.13.0+cpu'\ncuda: Optional[str] = None\nhip: Optional[str] = None\n"

ZEN4 = "fpu sse2 avx2 fma f16c avx512f avx512bw avx512vl avx512_vnni avx512_bf16"
ZEN3 = "fpu sse2 avx2 fma f16c"


def put(root: Path, name: str, text: str) -> None:
    """Write one file below the root."""
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def cpu(root: Path, model: str, family: int, number: int, threads: int, flags: str, *, per_core: int = 2) -> None:
    """/proc/cpuinfo and an affinity mask of all threads."""
    blocks = [
        f"processor\t: {i}\nvendor_id\t: AuthenticAMD\ncpu family\t: {family}\nmodel\t\t: {number}\n"
        f"model name\t: {model}\nphysical id\t: 0\ncore id\t\t: {i // per_core}\nflags\t\t: {flags}\n"
        for i in range(threads)
    ]
    put(root, "proc/cpuinfo", "\n".join(blocks) + "\n")
    put(root, "proc/self/status", f"Name:\tpython\nCpus_allowed:\tff\nCpus_allowed_list:\t0-{threads - 1}\n")
    put(root, "proc/version", "Linux version 6.14.0-29-generic (gcc 13.2.0)\n")


def memory(root: Path, total_gib: int, available_gib: int) -> None:
    """/proc/meminfo."""
    put(
        root,
        "proc/meminfo",
        f"MemTotal:       {total_gib << 20} kB\nMemFree:        {available_gib << 19} kB\n"
        f"MemAvailable:   {available_gib << 20} kB\n",
    )


def amd_gpu(
    root: Path,
    node: int,
    target: int,
    cus: int,
    vram: int,
    *,
    gtt: int = 0,
    minor: int = 128,
    location: int = 0x300,
    product: str = "",
    simd_per_cu: int = 4,
) -> None:
    """One GPU node of the KFD topology with its render device.  vram, gtt: bytes."""
    folder = f"sys/class/kfd/kfd/topology/nodes/{node}"
    wave = 64 if target < 100000 else 32
    put(
        root,
        f"{folder}/properties",
        f"cpu_cores_count 0\nsimd_count {cus * simd_per_cu}\nmem_banks_count 1\nmax_waves_per_simd 16\n"
        f"lds_size_in_kb 64\nwave_front_size {wave}\ngfx_target_version {target}\nsimd_per_cu {simd_per_cu}\n"
        f"vendor_id 4098\ndevice_id 29857\nlocation_id {location}\ndomain 0\ndrm_render_minor {minor}\n"
        "local_mem_size 0\n",
    )
    put(root, f"{folder}/mem_banks/0/properties", f"heap_type 1\nsize_in_bytes {vram}\nflags 0\nwidth 8192\n")
    device = f"sys/class/drm/renderD{minor}/device"
    put(root, f"{device}/mem_info_vram_total", f"{vram}\n")
    put(root, f"{device}/mem_info_gtt_total", f"{gtt}\n")
    put(root, f"{device}/vendor", "0x1002\n")
    if product:
        put(root, f"{device}/product_name", f"{product}\n")


def amd_driver(root: Path, rocm: str = "") -> None:
    """The CPU's own topology node, /dev/kfd, the amdgpu module and, where given, an installed ROCm."""
    put(
        root,
        "sys/class/kfd/kfd/topology/nodes/0/properties",
        "cpu_cores_count 16\nsimd_count 0\ngfx_target_version 0\n",
    )
    put(root, "dev/kfd", "")
    put(root, "sys/module/amdgpu/version", "6.12.12\n")
    if rocm:
        put(root, "opt/rocm/.info/version", f"{rocm}\n")


def machine(root: Path, name: str) -> Path:
    """Write the machine of that name below `root` and return it."""
    _MACHINES[name](root)
    return root


def _mi300x(root: Path) -> None:
    """A server with 8 MI300X, ROCm 7.2."""
    cpu(root, "AMD EPYC 9654 96-Core Processor", 25, 17, 16, ZEN4)
    memory(root, 2267, 2100)
    amd_driver(root, "7.2.4-120")
    for i in range(8):
        amd_gpu(
            root, i + 1, 90402, 304, 206_141_652_992, minor=128 + 8 * i, location=0x0500 + 0x1000 * i,
            product="AMD Instinct MI300X OAM" if i < 7 else "",
        )  # fmt: skip


def _strix_halo_and_card(root: Path) -> None:
    """A desktop whose first GPU is the APU's (gfx1151) and whose second is a discrete RX 7900 XTX; no ROCm."""
    cpu(root, "AMD RYZEN AI MAX+ 395 w/ Radeon 8060S", 26, 112, 32, f"{ZEN4} avx_vnni")
    memory(root, 125, 110)
    amd_driver(root)
    amd_gpu(root, 1, 110501, 40, 512 << 20, gtt=62 << 30, minor=128, location=0x7700, simd_per_cu=2)
    amd_gpu(root, 2, 110000, 96, 25_753_026_560, gtt=62 << 30, minor=129, location=0x0300, simd_per_cu=2)


def _display_only(root: Path) -> None:
    """A desktop with the display GPU of a Ryzen CPU (gfx1036) and nothing to compute on."""
    cpu(root, "AMD Ryzen 9 7950X 16-Core Processor", 25, 97, 32, ZEN4)
    memory(root, 62, 50)
    amd_driver(root)
    amd_gpu(root, 1, 100306, 2, 512 << 20, gtt=31 << 30, simd_per_cu=2)


def _mi250x(root: Path) -> None:
    """One MI250X, which is two devices; ROCm 6.4."""
    cpu(root, "AMD EPYC 7A53 64-Core Processor", 25, 48, 8, ZEN3)
    memory(root, 502, 480)
    amd_driver(root, "6.4.1-83")
    for i in range(2):
        amd_gpu(root, i + 1, 90010, 110, 64 << 30, minor=128 + i, location=0xC100 + 0x500 * i)


def _nvidia(root: Path) -> None:
    """One H200."""
    cpu(root, "AMD EPYC 9554 64-Core Processor", 25, 17, 16, ZEN4, per_core=1)
    memory(root, 128, 120)
    put(root, "proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.95.05\n")
    put(
        root,
        "proc/driver/nvidia/gpus/0000:18:00.0/information",
        "Model: \t\t NVIDIA H200\nIRQ:   \t\t 210\nGPU UUID: \t GPU-00000000\nBus Location: \t 0000:18:00.0\n",
    )


def _container(root: Path) -> None:
    """A container on a 64-thread machine: 8 GiB and two and a half CPUs (cgroup v2)."""
    cpu(root, "AMD EPYC 7763 64-Core Processor", 25, 1, 64, ZEN3)
    memory(root, 252, 240)
    put(root, "proc/self/cgroup", "0::/kubepods/pod7\n")
    put(root, "sys/fs/cgroup/memory.max", "max\n")
    put(root, "sys/fs/cgroup/kubepods/pod7/memory.max", f"{8 << 30}\n")
    put(root, "sys/fs/cgroup/kubepods/pod7/memory.current", f"{3 << 30}\n")
    put(root, "sys/fs/cgroup/kubepods/pod7/memory.stat", f"anon {1 << 30}\ninactive_file {1 << 30}\n")
    put(root, "sys/fs/cgroup/kubepods/pod7/cpu.max", "250000 100000\n")


def _container_v1(root: Path) -> None:
    """The same with cgroup v1: 4 GiB, 4 CPUs of an affinity mask."""
    cpu(root, "AMD EPYC 7763 64-Core Processor", 25, 1, 64, ZEN3)
    memory(root, 252, 240)
    put(root, "proc/self/status", "Cpus_allowed_list:\t0-1,8-9\n")
    put(root, "proc/self/cgroup", "11:memory:/docker/abc\n3:cpu,cpuacct:/docker/abc\n")
    put(root, "sys/fs/cgroup/memory/docker/abc/memory.limit_in_bytes", f"{4 << 30}\n")
    put(root, "sys/fs/cgroup/memory/docker/abc/memory.usage_in_bytes", f"{1 << 30}\n")
    put(root, "sys/fs/cgroup/cpu/docker/abc/cpu.cfs_quota_us", "-1\n")
    put(root, "sys/fs/cgroup/cpu/docker/abc/cpu.cfs_period_us", "100000\n")


def _wsl(root: Path) -> None:
    """WSL 2: the GPU is behind /dev/dxg; there is no /dev/kfd and no topology."""
    cpu(root, "AMD Ryzen 9 9950X 16-Core Processor", 26, 68, 32, ZEN4)
    memory(root, 31, 28)
    put(root, "proc/version", "Linux version 6.6.87.2-microsoft-standard-WSL2 (root@builder)\n")
    put(root, "dev/dxg", "")


def _bare(root: Path) -> None:
    """Nothing is told at all."""
    root.mkdir(parents=True, exist_ok=True)


_MACHINES = {
    "mi300x": _mi300x,
    "mi250x": _mi250x,
    "strix-halo-and-card": _strix_halo_and_card,
    "display-only": _display_only,
    "nvidia": _nvidia,
    "container": _container,
    "container-v1": _container_v1,
    "wsl": _wsl,
    "bare": _bare,
}
