"""AMD GPUs: driver, device nodes, true instruction set, override, versions, partitions, memory, telemetry, WSL."""

from __future__ import annotations

import re

from lumen.doctor.finding import Case, Check, Result, broken, gib, note, ok, warning
from lumen.hardware import ARCHITECTURES
from lumen.hardware.choice import no_code_fix, nodes_problem
from lumen.hardware.gpus import GTT_SINCE, override_arch
from lumen.hardware.text import version_pair
from lumen.hardware.wheels import install_command

# When ROCm releases came out, as months since 2023, and which out-of-tree kernel driver came with each. [M]
RELEASED = {
    (5, 7): 8, (6, 0): 11, (6, 1): 15, (6, 2): 19, (6, 3): 23, (6, 4): 27, (7, 0): 32, (7, 1): 33, (7, 2): 36,
    (7, 13): 41, (7, 14): 43, (10, 0): 44, (10, 1): 45, (10, 2): 46,
}  # fmt: skip
DRIVER_OF = {
    (6, 2): (5, 7), (6, 3): (6, 0), (6, 7): (6, 1), (6, 8): (6, 2), (6, 10): (6, 3), (6, 12): (6, 4), (6, 14): (7, 0),
    (6, 16): (7, 1),
}  # fmt: skip
MONTHS_APART = 12
"""Since ROCm 6.4 driver and user space work together when they are within a year. [S: ROCm compatibility pages]"""

WSL_LIBRARIES = ("/usr/lib/librocdxg.so", "/usr/lib/x86_64-linux-gnu/librocdxg.so", "/opt/rocm/lib/librocdxg.so")
DISTRO_RUNTIME = "/usr/lib/x86_64-linux-gnu/libhsa-runtime64.so.1"


def driver(case: Case) -> Result | None:
    """The amdgpu kernel module."""
    machine = case.machine
    if machine.wsl or not (case.amd or machine.kfd or any(gpu.vendor == "amd" for gpu in machine.idle)):
        return None
    if machine.kernel_driver:
        return ok(f"amdgpu {machine.kernel_driver} on Linux {machine.kernel or '?'} (/sys/module/amdgpu)")
    if case.amd:
        return note("no /sys/module/amdgpu, though the topology lists GPUs: the driver is built into the kernel")
    idle = [gpu for gpu in machine.idle if gpu.vendor == "amd"]
    fix = "sudo modprobe amdgpu; if that fails: install amdgpu-dkms from AMD, or a newer kernel"
    text = f"{len(idle)} AMD GPU(s) on the bus ({', '.join(gpu.pci for gpu in idle)}) and no amdgpu module"
    if any(gpu.accelerator for gpu in idle):
        return broken(text, fix, "sudo modprobe amdgpu")
    return warning(text, fix, "sudo modprobe amdgpu") if idle else None


def nodes(case: Case) -> Result | None:
    """/dev/kfd and /dev/dri/renderD*: there, and open to this process."""
    if case.machine.wsl or not (case.amd or case.machine.kfd):
        return None
    view = case.view
    names = ["/dev/kfd", *(f"/dev/dri/{gpu.render_node}" for gpu in case.amd if gpu.render_node)]
    seen = {name: node for name in dict.fromkeys(names) if (node := view.node(name)) is not None}
    missing = [name for name in names if name not in seen]
    said = []
    for name, node in list(seen.items())[:3]:
        owner = view.group_name(node.group) or str(node.group)
        said.append(f"{name} group {owner} mode {node.mode:o}{'' if node.usable else ' CLOSED'}")
    text = "; ".join(said) + (f"; and {len(seen) - 3} more" if len(seen) > 3 else "")
    closed = [(name, node) for name, node in seen.items() if not node.usable]
    if closed:
        numbers = sorted({node.group for _, node in closed})
        groups = [view.group_name(number) or str(number) for number in numbers]
        mine = ", ".join(map(str, sorted(view.groups()))) or "none"
        text += f"; this process has groups {mine}"
        if case.machine.container:
            adds = " ".join(f"--group-add {number}" for number in numbers)
            return broken(text, f"start the container with --device=/dev/kfd --device=/dev/dri {adds} --ipc=host")
        users = view.environment.get("LOGNAME") or view.environment.get("USER") or ""
        members = [line.split(":")[-1].split(",") for line in view.read("/etc/group").splitlines()]
        listed = [line.split(":")[0] for line in view.read("/etc/group").splitlines()]
        already = users and all(users in members[listed.index(group)] for group in groups if group in listed)
        if already and all(group in listed for group in groups):
            return broken(f"{text}; {users} is in {', '.join(groups)} since this login", "log out and in again")
        fix = "sudo usermod -aG render,video $LOGNAME"
        return broken(text, f"{fix}, then log out and in again", fix)
    problem = nodes_problem(case.machine)
    if problem is not None:
        return broken(f"{text or '/dev/kfd is missing'}; {problem.what}", problem.fix)
    if "/dev/kfd" in seen and missing:
        fix = "start the container with --device=/dev/dri" if case.machine.container else "sudo modprobe amdgpu"
        return broken(f"{text}; {', '.join(missing)} missing", fix)
    return ok(text)


def isa(case: Case) -> Result | None:
    """The true instruction sets, by the kernel, and what torch's wheels carry."""
    gpus = [gpu for gpu in case.machine.gpus if gpu.vendor == "amd"]
    if not gpus:
        return None
    counts: dict[str, int] = {}
    for gpu in gpus:
        counts[gpu.arch] = counts.get(gpu.arch, 0) + 1
    text = ", ".join(arch if count == 1 else f"{count} x {arch}" for arch, count in counts.items())
    text += " (KFD topology, gfx_target_version)"
    unknown = [arch for arch in counts if arch not in ARCHITECTURES]
    if unknown:
        return warning(
            f"{text}; {', '.join(unknown)} is not in Lumen's table: FP8 and kernels are chosen as for an unknown chip",
            "lumen hardware list; report the chip with the output of `lumen doctor --json`",
        )
    override = override_arch(case.variable("HSA_OVERRIDE_GFX_VERSION"))
    uncarried = [gpu for gpu in gpus if gpu.trainable and ARCHITECTURES[gpu.arch].pytorch != "yes"]
    if uncarried and override not in ARCHITECTURES and case.torch_kind == "rocm":
        gpu = uncarried[0]
        which = "PyTorch's own wheels do not carry"
        if ARCHITECTURES[gpu.arch].pytorch == "newest":
            which = "only the newest wheels carry"
        return warning(f"{text}; {which} {gpu.arch}", no_code_fix(gpu, case.machine.rocm))
    displays = [gpu.arch for gpu in gpus if not gpu.trainable]
    return note(f"{text}; {', '.join(displays)} is a display part") if displays else ok(text)


def override(case: Case) -> Result | None:
    """HSA_OVERRIDE_GFX_VERSION makes every GPU pretend to be another."""
    names = [name for name in case.view.environment if name.startswith("HSA_OVERRIDE_GFX_VERSION")]
    if not names or not case.has_amd:
        return None
    value, true = case.variable(names[0]), [gpu.arch for gpu in case.machine.gpus if gpu.vendor == "amd"]
    pretended = override_arch(value)
    text = f"{names[0]}={value}; the KFD topology says {', '.join(dict.fromkeys(true)) or 'nothing'}"
    unset = f"unset {names[0]}"
    if not pretended:
        return broken(f"{text}: it must read like 11.0.0", unset, unset)
    hidden = [arch for arch in dict.fromkeys(true) if arch != pretended]
    if not hidden:
        return ok(f"{text}: the same")
    if all(ARCHITECTURES[arch].override == value for arch in hidden if arch in ARCHITECTURES) and all(
        arch in ARCHITECTURES and ARCHITECTURES[arch].pytorch != "yes" for arch in hidden
    ):
        return note(f"{text}: needed where torch has no code for {', '.join(hidden)}; it adds neither fp8 nor bf16")
    return warning(
        f"{text}: the override hides {', '.join(hidden)} from kernels and from Triton, and adds neither fp8 nor bf16",
        f"{unset}; torch's wheels carry {', '.join(hidden)}, or take one that does: "
        f"{install_command('amd', hidden[0], case.machine.rocm).partition('&& ')[2]}",
        unset,
    )


def versions(case: Case) -> Result | None:
    """Kernel driver and user space, which should be within a year of each other."""
    if case.torch_kind != "rocm" or case.machine.torch is None or not case.machine.kernel_driver:
        return None
    user = version_pair(case.machine.torch.toolkit)
    module = version_pair(case.machine.kernel_driver)
    text = f"torch brings ROCm {case.machine.torch.toolkit}; amdgpu {case.machine.kernel_driver}"
    if case.machine.rocm:
        text += f"; installed ROCm {case.machine.rocm} (/opt/rocm/.info/version)"
    release = DRIVER_OF.get(module) if module else None
    if release is None or user not in RELEASED:
        return ok(f"{text} (Linux {case.machine.kernel})")
    months = abs(RELEASED[user] - RELEASED[release])
    text += f" (that of ROCm {release[0]}.{release[1]}, {months} months apart)"
    if months > MONTHS_APART:
        older = "upgrade amdgpu-dkms" if RELEASED[release] < RELEASED[user] else "install a newer torch"
        return warning(f"{text}: more than a year", f"{older}; since 6.4 driver and user space may be a year apart")
    return ok(text)


def partition(case: Case) -> Result | None:
    """An Instinct cut into partitions shows as several small GPUs."""
    cut = [gpu for gpu in case.amd if gpu.partition not in ("", "SPX")]
    if not cut:
        return None
    first = cut[0]
    return warning(
        f"{len(cut)} devices are partitions in {first.partition} mode, {first.compute_units} CUs and "
        f"{gib(first.memory)} each (current_compute_partition)",
        "sudo amd-smi set --compute-partition SPX (with every process off the GPU)",
        "sudo amd-smi set --compute-partition SPX",
    )


def apu_memory(case: Case) -> Result | None:
    """How much of the system's memory a GPU without its own may use."""
    apus = [gpu for gpu in case.amd if gpu.shared_memory]
    if not apus or case.machine.wsl:
        return None
    gpu, release = apus[0], version_pair(case.machine.kernel)
    text = f"{gpu.name}: cut out {gib(gpu.vram)}, lent {gib(gpu.gtt)} (mem_info_vram_total, mem_info_gtt_total)"
    if release is not None and release < GTT_SINCE and gpu.vram < gpu.gtt:
        return warning(
            f"{text}; Linux {case.machine.kernel} computes in the cut-out part alone",
            "upgrade to Linux 6.10 or later, or raise the GPU's memory in the firmware",
        )
    if gpu.vram >= gpu.gtt:
        return note(
            f"{text}; compute uses the cut-out part, which the system cannot: a small one in the firmware is better"
        )
    total = case.machine.memory.total + gpu.vram
    if gpu.gtt < 0.4 * total:
        pages = int(0.75 * total) // 4096
        return warning(
            f"{text}: little of the system's {gib(total)}", f"add ttm.pages_limit={pages} to the kernel command line"
        )
    return ok(f"{text}; compute uses what is lent")


def telemetry(case: Case) -> Result | None:
    """Temperature, power and memory, by whatever answers."""
    if not (case.amd or (case.machine.wsl and case.has_amd)):
        return None
    found = case.telemetry
    if found.source in ("amd-smi", "rocm-smi", "sysfs"):
        hot = max((r.temperature for r in found.readings if r.temperature is not None), default=None)
        known = f"{len(found.readings)} GPU(s)" + (f", hottest sensor {hot:.0f} °C" if hot is not None else "")
        text = f"{found.source}: {known}" + (f" ({'; '.join(found.tried)})" if found.tried else "")
        errors = sum(r.ecc or 0 for r in found.readings)
        if errors:
            return warning(
                f"{text}; {errors} uncorrectable memory errors", "reboot; if they return, have the GPU replaced"
            )
        if hot is not None and hot >= 100:
            return warning(f"{text}: throttling starts about here", "clean the cooling, lower the power cap")
        if any("N/A" in line for line in found.tried):
            return warning(
                f"{text}: the tool is older than the driver",
                "upgrade amd-smi to ROCm 7.13 or later (package amd-smi-lib)",
            )
        return ok(text)
    text = f"unavailable: {'; '.join(found.tried)}"
    if case.machine.wsl:
        return note(f"{text}. Usual under WSL; training runs without it")
    return warning(text, "install amd-smi (package amd-smi-lib); in a container, pass /sys/class/drm on")


def wsl(case: Case) -> Result | None:
    """AMD under WSL: the GPU comes through /dev/dxg, and ROCm needs a library for it."""
    if not case.machine.wsl or case.torch_kind == "cuda":
        return None
    view = case.view
    thunk = next((name for name in WSL_LIBRARIES if view.exists(name) or view.exists(f"{name}.1")), "")
    core = view.exists("/usr/lib/wsl/lib/libdxcore.so")
    text = f"/dev/dxg {'there' if case.machine.dxg else 'missing'}, libdxcore {'there' if core else 'missing'}, "
    text += f"librocdxg {thunk or 'missing'}; no /dev/kfd is normal here"
    if case.torch_kind != "rocm":
        return note(f"{text}; torch is a {case.torch_kind or 'missing'} build, so the CPU is used")
    if not case.machine.dxg:
        return broken(text, "update WSL (wsl --update in Windows) and the Windows driver")
    if view.exists(DISTRO_RUNTIME):
        fix = "sudo apt-get remove libhsa-runtime64-1 libhsakmt1"
        return broken(f"{text}; the distribution's own {DISTRO_RUNTIME} is found first and knows no WSL", fix, fix)
    if not thunk:
        return broken(text, "install amdrocm-wsl (ROCm 7.13 and later), or AMD's WSL package of your ROCm release")
    version = version_pair(case.machine.torch.toolkit if case.machine.torch else "")
    if version is not None and version < (7, 13) and case.variable("HSA_ENABLE_DXG_DETECTION") != "1":
        export = "export HSA_ENABLE_DXG_DETECTION=1"
        return broken(f"{text}; ROCm {version[0]}.{version[1]} looks there only when told", export, export)
    return ok(text)


def stale_library_path(case: Case) -> Result | None:
    """LD_LIBRARY_PATH that puts another ROCm before the one that torch brings."""
    if case.torch_kind != "rocm" or case.machine.torch is None:
        return None
    folders = [part for part in case.variable("LD_LIBRARY_PATH").split(":") if "rocm" in part.lower()]
    if not folders:
        return None
    mine, bad = version_pair(case.machine.torch.toolkit), []
    for folder in folders:
        named = re.search(r"rocm-(\d+)\.(\d+)", folder)
        version = (int(named[1]), int(named[2])) if named else version_pair(case.machine.rocm)
        if not case.view.exists(folder):
            bad.append(f"{folder} does not exist")
        elif version is not None and version != mine:
            bad.append(f"{folder} is ROCm {version[0]}.{version[1]}")
    text = f"LD_LIBRARY_PATH={case.variable('LD_LIBRARY_PATH')}; torch brings ROCm {case.machine.torch.toolkit}"
    if bad:
        return warning(f"{text}; {', '.join(bad)}", "unset LD_LIBRARY_PATH", "unset LD_LIBRARY_PATH")
    return ok(text)


CHECKS = (
    Check("amd-driver", "amd", "without the kernel driver there is no /dev/kfd and no GPU", driver),
    Check("amd-nodes", "amd", "a closed node looks like no GPU at all", nodes),
    Check("amd-isa", "amd", "kernels and the FP8 dialect go by the true instruction set", isa),
    Check("override", "amd", "kernels compiled for another chip are slow, wrong or crash", override),
    Check("rocm-versions", "amd", "driver and user space that are too far apart hang or fail to start", versions),
    Check("partition", "amd", "a partition is a fraction of the chip: memory and speed", partition),
    Check("apu-memory", "amd", "what a model may take without its own memory", apu_memory),
    Check("telemetry", "amd", "the thermal guard and the monitor read it", telemetry),
    Check("wsl", "amd", "under WSL the GPU comes another way, and needs other libraries", wsl),
    Check("library-path", "amd", "an old ROCm found first crashes or computes with old kernels", stale_library_path),
)
