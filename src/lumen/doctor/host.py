"""The host: processor, memory, disk, compiler.  They matter on every machine, and are all there is without a GPU."""

from __future__ import annotations

from pathlib import Path

from lumen.doctor.finding import Case, Check, Result, broken, gib, note, ok, warning

SHM_RANKS = 1 << 30
"""Bytes of /dev/shm below which ranks on one machine run into trouble; containers get 64 MB by default."""

SMALL_DISK, LITTLE_MEMORY = 10 << 30, 2 << 30


def features(case: Case) -> Result | None:
    """Instruction sets that decide how fast the CPU multiplies."""
    cpu = case.machine.cpu
    if not cpu.flags:
        return note("/proc/cpuinfo tells no flags")
    if "asimd" in cpu.flags:
        have = [name for name in ("bf16", "i8mm") if name in cpu.flags]
        return ok(f"{cpu.model}: Arm, {' '.join(have) or 'neither bf16 nor i8mm'} (/proc/cpuinfo)")
    groups = (
        ("AVX-512", "avx512f" in cpu.flags),
        ("VNNI", bool(cpu.flags & {"avx512_vnni", "avx_vnni"})),
        ("BF16", bool(cpu.flags & {"avx512_bf16", "amx_bf16"})),
    )
    known = ", ".join(name for name, there in groups if there) or "AVX2 only"
    core = f" ({cpu.microarchitecture})" if cpu.microarchitecture else ""
    text = f"{cpu.model}{core}: {known} (/proc/cpuinfo flags)"
    if "avx2" not in cpu.flags:
        return warning(
            f"{cpu.model}{core}: no AVX2 (/proc/cpuinfo flags)",
            "in a virtual machine, pass the host's processor on (`-cpu host`); else train on another machine",
        )
    lacking = [name for name, there in groups if not there]
    return note(f"{text}; without {', '.join(lacking)}: slower, same results") if lacking else ok(text)


def cores(case: Case) -> Result | None:
    """How many threads may run, and what OpenMP was told."""
    cpu, told = case.machine.cpu, case.variable("OMP_NUM_THREADS")
    text = f"{cpu.cores} cores, {cpu.threads} usable threads (affinity and quota)"
    threads = told.partition(",")[0]
    if not threads.isdigit():
        return ok(text)
    text += f"; OMP_NUM_THREADS={told}"
    if int(threads) > cpu.threads:
        return warning(
            f"{text}: more threads than may run; they wait for each other", "unset OMP_NUM_THREADS",
            "unset OMP_NUM_THREADS",
        )  # fmt: skip
    if int(threads) < cpu.threads and case.choice.gpu is None:
        return note(f"{text}: training on the CPU leaves threads unused", "unset OMP_NUM_THREADS")
    return ok(text)


def memory(case: Case) -> Result | None:
    """Main memory: of the machine, or of the container."""
    found = case.machine.memory
    if not found.total:
        return note("/proc/meminfo tells nothing")
    where = "limit of the control group" if found.limit != "machine" else "/proc/meminfo"
    text = f"{gib(found.total)}, {gib(found.available)} available ({where})"
    if found.available < LITTLE_MEMORY:
        return warning(f"{text}: too little to load a model", "end what holds memory: ps aux --sort=-rss | head")
    return ok(text)


def shared_memory(case: Case) -> Result | None:
    """/dev/shm, through which ranks and loader processes on one machine exchange data."""
    space = case.view.space("/dev/shm")
    if space is None:
        return None
    text = f"/dev/shm has {gib(space.total)}"
    if space.total < SHM_RANKS and (len(case.amd) + len(case.nvidia) > 1 or case.machine.container):
        fix = "start the container with --ipc=host, or --shm-size=16g"
        return warning(f"{text}: several ranks need more", fix if case.machine.container else "mount it larger")
    return ok(text)


def disk(case: Case) -> Result | None:
    """Room for checkpoints where the command was started."""
    folder = str(Path.cwd()) if case.view.live else "/"
    space = case.view.space(folder)
    if space is None:
        return None
    kind = f", {space.kind}" if space.kind else ""
    text = f"{gib(space.free)} of {gib(space.total)} free at {folder}{kind}"
    if space.free < SMALL_DISK:
        return warning(
            f"{text}: a checkpoint of a 3B model does not fit", "free some room, or set output_dir elsewhere"
        )
    if space.kind in ("tmpfs", "ramfs"):
        return note(f"{text}: checkpoints would lie in memory and not survive a restart", "set output_dir elsewhere")
    return ok(text)


def compiler(case: Case) -> Result | None:
    """A C++ compiler: torch.compile and our own kernels use it."""
    if case.machine.compiler:
        return ok(f"{case.machine.compiler} (CXX and PATH)")
    return note("no c++, g++ or clang++ on PATH: layers are not compiled; slower, same results", "apt-get install g++")


def kernel(case: Case) -> Result | None:
    """Linux itself."""
    if not case.machine.kernel:
        return broken("no Linux release in /proc/version", "Lumen runs on Linux") if case.view.live else None
    inside = "in a container" if case.machine.container else "on the machine itself"
    return ok(f"Linux {case.machine.kernel}, {'WSL, ' if case.machine.wsl else ''}{inside}")


CHECKS = (
    Check("kernel", "host", "drivers and memory limits follow from it", kernel),
    Check("cpu-features", "host", "AVX-512, VNNI and BF16 decide the speed of bf16 and int8 on the CPU", features),
    Check("cpu-cores", "host", "too many threads wait for each other, too few leave cores idle", cores),
    Check(
        "memory", "host", "weights, optimizer state and offload live here; a container's limit kills the run", memory
    ),
    Check("shared-memory", "host", "ranks and loaders on one machine exchange data through it", shared_memory),
    Check("disk-space", "host", "a checkpoint that does not fit ends the run", disk),
    Check("compiler", "host", "torch.compile and the CPU kernels need one", compiler),
)
