"""`lumen hardware`: what this machine is, what its chips can do, and which GPU a run would take."""

from __future__ import annotations

import argparse
import json
from typing import Any

from lumen.hardware import CHIPS, Chip, Gpu, Machine, architecture, find_chip, probe
from lumen.hardware.architectures import ARCHITECTURES

ELEMENTS = ("fp32", "bf16", "fp16", "int8", "fp8", "mxfp8", "mxfp4")


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="lumen hardware", description="What this machine is and what it can do.")
    parser.add_argument("--json", action="store_true", help="for a machine to read")
    parser.add_argument("--root", default="/", help="read the machine recorded below this folder instead")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--chips", action="store_true", help="the table of known chips with their peaks")
    what.add_argument("--chip", metavar="NAME", help="all that is known about one chip or architecture")
    arguments = parser.parse_args(argv)
    if arguments.chips:
        values: Any = [chip_dict(chip) for chip in CHIPS]
        lines = chip_table()
    elif arguments.chip:
        values = _one(arguments.chip)
        lines = [f"{key:<18} {_text(value)}" for key, value in values.items()]
    else:
        machine = probe(arguments.root)
        values = machine.as_dict()
        lines = describe(machine)
    print(json.dumps(values, indent=2) if arguments.json else "\n".join(lines))
    return 0


def chip_dict(chip: Chip) -> dict[str, Any]:
    """A chip's row with computed peaks (TFLOPS, TOPS) and its architecture's facts."""
    facts = chip.architecture
    return {
        "name": chip.name,
        "architecture": chip.arch,
        "family": facts.family,
        "memory_gb": chip.memory_gb or "shared",
        "bandwidth_gb_s": chip.bandwidth,
        "compute_units": chip.cus,
        "clock_ghz": chip.clock,
        "peak": {name: round(peak, 1) for name in ELEMENTS if (peak := chip.peak(name)) is not None},
        **_arch_dict(chip.arch),
        "evidence": [chip.evidence, *facts.evidence],
    }


def _arch_dict(name: str) -> dict[str, Any]:
    facts = architecture(name)
    return {
        "wave": facts.wave,
        "lds_kib": facts.lds_kib,
        "matrix_unit": facts.matrix or "none",
        "fp8": facts.fp8 or "emulated (ocp)",
        "mx": "native" if facts.mx else "emulated",
        "pytorch_wheels": facts.pytorch,
        "fused_attention": facts.sdpa,
    }


def _one(name: str) -> dict[str, Any]:
    """Facts of a chip, or of an architecture where the name is one."""
    plain = name.lower().partition(":")[0]
    if plain in ARCHITECTURES or plain.startswith(("gfx", "sm_")):
        facts = architecture(plain)
        chips = [chip.name for chip in CHIPS if chip.arch == facts.name]
        return {
            "architecture": facts.name,
            "family": facts.family,
            "ops_per_clock_cu": dict(facts.ops),
            **_arch_dict(facts.name),
            "chips": chips,
            "evidence": list(facts.evidence),
        }
    return chip_dict(find_chip(name))


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {item}" for key, item in value.items())
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def chip_table() -> list[str]:
    """One line a chip: memory, bandwidth, and dense peaks."""
    lines = [f"{'chip':<24}{'arch':<9}{'GB':>5}{'GB/s':>7}{'CU':>5}" + "".join(f"{name:>8}" for name in ELEMENTS)]
    for chip in CHIPS:
        peaks = [chip.peak(name) for name in ELEMENTS]
        cells = "".join(f"{'-' if peak is None else format(peak, '.0f'):>8}" for peak in peaks)
        memory = f"{chip.memory_gb:.0f}" if chip.memory_gb else "sys"
        lines.append(f"{chip.name:<24}{chip.arch:<9}{memory:>5}{chip.bandwidth:>7.0f}{chip.cus:>5}{cells}")
    return [*lines, "peaks: dense TFLOPS (TOPS for int8); -: not native, emulated"]


def describe(machine: Machine) -> list[str]:
    """The probe's findings as lines for a person."""
    cpu, memory = machine.cpu, machine.memory
    speed = [name for name, there in (("bf16", cpu.bf16), ("int8", cpu.int8)) if there]
    core = f" ({cpu.microarchitecture})" if cpu.microarchitecture else ""
    lines = [
        f"cpu       {cpu.model}{core}, {cpu.cores} cores, {cpu.threads} usable; "
        + (f"native {' and '.join(speed)}" if speed else "no native bf16 or int8 products"),
        f"memory    {_gib(memory.total)} GiB, {_gib(memory.available)} GiB free"
        + (" (limit of the control group)" if memory.limit != "machine" else ""),
        f"compiler  {machine.compiler or 'none: C++ kernels are off, the results are the same (apt install g++)'}",
    ]
    torch = machine.torch
    if torch is None:
        lines.append("torch     not installed (make setup, or see docs/install.md)")
    else:
        lines.append(
            f"torch     {torch.version}, {torch.kind} build" + (f" ({torch.toolkit})" if torch.toolkit else "")
        )
    if machine.rocm or machine.kernel_driver or machine.kfd:
        lines.append(f"rocm      {machine.rocm or 'not installed'}; amdgpu driver {machine.kernel_driver or 'missing'}")
    lines += [_gpu_line(gpu, gpu is machine.usable) for gpu in machine.gpus] or ["gpu       none found"]
    lines += [f"env       {name}={value}" for name, value in machine.environment.items()]
    return [*lines, *(f"note      {text}" for text in remarks(machine))]


def _gpu_line(gpu: Gpu, chosen: bool) -> str:
    memory = f"{_gib(gpu.memory)} GiB" + (" of the system's memory" if gpu.shared_memory else "")
    text = f"gpu {gpu.index}     {gpu.name}, {gpu.arch or 'architecture unknown'}, {memory}"
    if gpu.arch in ARCHITECTURES:
        facts = ARCHITECTURES[gpu.arch]
        native = [name for name in ELEMENTS[1:] if facts.native(name)]
        text += f", native {' '.join(native)}" + (f" (FP8 {facts.fp8})" if facts.fp8 else "")
    return text + ("  <- used" if chosen else "")


def remarks(machine: Machine) -> list[str]:
    """What a person should know about what was found, most important first."""
    found = []
    vendors = {gpu.vendor for gpu in machine.gpus}
    kind = machine.torch.kind if machine.torch else ""
    for vendor, wanted in (("amd", "rocm"), ("nvidia", "cuda")):
        if vendor in vendors and kind and kind != wanted:
            found.append(
                f"torch is a {kind} build and cannot use the {vendor.upper()} GPU; to change it: "
                "pip uninstall torch && make setup"
            )
    override = machine.environment.get("HSA_OVERRIDE_GFX_VERSION")
    if override and machine.gpus:
        true = ", ".join(gpu.arch for gpu in machine.gpus if gpu.vendor == "amd")
        found.append(f"HSA_OVERRIDE_GFX_VERSION={override} hides the true instruction set ({true}) from kernels")
    if machine.usable and any(gpu.shared_memory and gpu.index < machine.usable.index for gpu in machine.gpus):
        found.append(
            f"GPU {machine.usable.index} is a discrete card and is used before the one that shares system memory"
        )
    if machine.wsl and not machine.gpus:
        found.append("WSL: the GPU, if there is one, is seen by torch only; tools for telemetry are not there")
    return found


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f}"
