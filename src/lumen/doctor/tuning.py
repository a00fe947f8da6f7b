"""Settings of AMD machines that decide whether several GPUs work together and how fast attention and GEMMs are."""

from __future__ import annotations

from lumen.doctor.finding import Case, Check, Result, note, ok, warning
from lumen.hardware import ARCHITECTURES
from lumen.hardware.text import version_pair

RCCL = (
    "NCCL_DEBUG", "NCCL_SOCKET_IFNAME", "NCCL_IB_HCA", "NCCL_IB_DISABLE", "NCCL_P2P_DISABLE", "NCCL_MIN_CTAS",
    "NCCL_MAX_CTAS", "NCCL_CUMEM_ENABLE", "RCCL_MSCCL_ENABLE", "RCCL_MSCCLPP_ENABLE", "HSA_FORCE_FINE_GRAIN_PCIE",
)  # fmt: skip
HIPBLASLT = {"gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1101", "gfx1150", "gfx1151", "gfx1200", "gfx1201"}
"""Architectures that hipBLASLt has kernels for. [M]"""


def iommu(case: Case) -> Result | None:
    """An IOMMU that translates hangs transfers between GPUs."""
    cards = [gpu for gpu in case.amd if not gpu.shared_memory]
    if len(cards) < 2 or case.machine.wsl:
        return None
    units, line = case.view.glob("/sys/class/iommu/*"), case.view.read("/proc/cmdline").split()
    told = [word for word in line if "iommu" in word]
    text = f"{len(units)} IOMMU(s) (/sys/class/iommu), kernel command line: {' '.join(told) or 'nothing about it'}"
    if (
        not units
        or "iommu=pt" in told
        or any(word in told for word in ("iommu=off", "amd_iommu=off", "intel_iommu=off"))
    ):
        return ok(text)
    return warning(
        f"{text}: transfers between {len(cards)} GPUs may hang",
        "add iommu=pt to GRUB_CMDLINE_LINUX in /etc/default/grub, then sudo update-grub and reboot",
        "sudo sed -i 's/^GRUB_CMDLINE_LINUX=\"/&iommu=pt /' /etc/default/grub && sudo update-grub  # then reboot",
    )


def numa_balancing(case: Case) -> Result | None:
    """Automatic page migration between memory nodes stalls GPU transfers."""
    value = case.view.read("/proc/sys/kernel/numa_balancing")
    cards = [gpu for gpu in case.amd if not gpu.shared_memory]
    if not value or not cards:
        return None
    text = f"/proc/sys/kernel/numa_balancing is {value}"
    if value == "0" or len(case.view.glob("/sys/devices/system/node/node[0-9]*")) < 2:
        return ok(text)
    fix = "echo 0 | sudo tee /proc/sys/kernel/numa_balancing"
    return warning(f"{text}: pages move under running transfers", fix, fix)


def attention(case: Case) -> Result | None:
    """Fused attention in torch: which architectures have it, and behind which switch."""
    gpu = case.choice.gpu
    if gpu is None or gpu.vendor != "amd" or gpu.arch not in ARCHITECTURES:
        return None
    state, switch = ARCHITECTURES[gpu.arch].sdpa, "TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL"
    if state == "yes":
        return ok(f"{gpu.arch} has fused attention in torch's wheels")
    if state == "no":
        return note(f"{gpu.arch} has no fused attention in torch's wheels: attention takes more memory and time")
    if case.variable(switch) == "1":
        return ok(f"{gpu.arch}: {switch}=1 switches fused attention on")
    return warning(
        f"{gpu.arch} has fused attention behind {switch}=1 alone, which is not set: more memory and time",
        f"export {switch}=1",
        f"export {switch}=1",
    )


def blas(case: Case) -> Result | None:
    """Settings of the matrix libraries."""
    names = ("TORCH_BLAS_PREFER_HIPBLASLT", "HIPBLASLT_TENSILE_LIBPATH", "PYTORCH_TUNABLEOP_ENABLED")
    given = {name: value for name in names if (value := case.variable(name))}
    if not given or not case.amd:
        return None
    gpu = case.choice.gpu or case.amd[0]
    text = ", ".join(f"{name}={value}" for name, value in given.items())
    folder = given.get("HIPBLASLT_TENSILE_LIBPATH")
    if folder and not case.view.exists(folder):
        unset = "unset HIPBLASLT_TENSILE_LIBPATH"
        return warning(f"{text}: that folder does not exist, and every GEMM fails", unset, unset)
    if given.get("TORCH_BLAS_PREFER_HIPBLASLT") == "1" and gpu.arch not in HIPBLASLT:
        export = "export TORCH_BLAS_PREFER_HIPBLASLT=0"
        return warning(f"{text}: hipBLASLt has no kernels for {gpu.arch} and crashes", export, export)
    if given.get("PYTORCH_TUNABLEOP_ENABLED") == "1":
        return note(f"{text}: each new GEMM shape is tuned first, so the first steps are slow")
    return ok(text)


def rccl(case: Case) -> Result | None:
    """Settings of the collectives, where there are several GPUs."""
    cards = [gpu for gpu in case.amd if not gpu.shared_memory]
    if len(cards) < 2:
        return None
    given = {name: value for name in RCCL if (value := case.variable(name))}
    home = case.variable("HOME")
    files = [name for name in ("/etc/rccl.conf", f"{home}/.rccl.conf") if name.strip("/") and case.view.exists(name)]
    text = ", ".join([*(f"{name}={value}" for name, value in given.items()), *files]) or "no settings"
    wanted = given.get("NCCL_SOCKET_IFNAME", "").lstrip("^=").split(",")[0]
    links = [name.rpartition("/")[2] for name in case.view.glob("/sys/class/net/*")]
    excluded = given.get("NCCL_SOCKET_IFNAME", "").startswith("^")
    if wanted and links and not excluded and not any(link.startswith(wanted) for link in links):
        fix = "unset NCCL_SOCKET_IFNAME"
        return warning(
            f"{text}: there is no network interface {wanted} ({', '.join(links)}); collectives hang", fix, fix
        )
    if given.get("NCCL_P2P_DISABLE") == "1":
        fix = "unset NCCL_P2P_DISABLE"
        return warning(f"{text}: GPUs exchange data through main memory", fix, fix)
    version = version_pair(case.machine.torch.toolkit if case.machine.torch else "")
    if any("MSCCL" in name for name in given) and version is not None and version >= (7, 13):
        return note(f"{text}: MSCCL is gone from ROCm 7.13 and later; the setting changes nothing")
    return ok(text)


CHECKS = (
    Check("iommu", "amd", "a translating IOMMU hangs the first collective", iommu),
    Check("numa-balancing", "amd", "AMD's tuning guide switches it off for training", numa_balancing),
    Check("fused-attention", "amd", "without it attention keeps a matrix of length x length", attention),
    Check("blas", "amd", "a wrong setting makes every GEMM fail or slow", blas),
    Check("rccl", "amd", "a wrong setting makes collectives hang or slow", rccl),
)
