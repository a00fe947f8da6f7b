"""`lumen hardware [list | show NAME]`: what this machine is, what chips can do, and which GPU a run would take."""

from __future__ import annotations

import argparse
import json
from typing import Any

from lumen.hardware import CHIPS, Chip, Gpu, Machine, architecture, choose, find_chip, probe
from lumen.hardware.architectures import ARCHITECTURES
from lumen.hardware.cpus import CPUS, CpuChip

ELEMENTS = ("fp32", "bf16", "fp16", "int8", "fp8", "mxfp8", "mxfp4")


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="lumen hardware", description="What this machine is and what it can do.")
    parser.add_argument(
        "what", nargs="?", choices=("list", "show"), help="list: every known chip; show NAME: all about one"
    )
    parser.add_argument("name", nargs="*", help="a chip (MI300X, RX 7900 XTX), an architecture (gfx942) or a processor")
    parser.add_argument("--json", action="store_true", help="for a machine to read")
    parser.add_argument("--root", default="/", help="read the machine recorded below this folder instead")
    arguments = parser.parse_args(argv)
    if (arguments.what == "show") != bool(arguments.name):
        parser.error("`lumen hardware show NAME` and `lumen hardware list` are the forms")
    if arguments.what == "list":
        values: Any = [chip_dict(chip) for chip in CHIPS] + [cpu_dict(chip) for chip in CPUS]
        lines = chip_table()
    elif arguments.what == "show":
        values = facts_of(" ".join(arguments.name))
        lines = [f"{key.replace('_', ' '):<22} {_text(value)}" for key, value in values.items()]
    else:
        machine = probe(arguments.root)
        choice = choose(machine)
        values = machine.as_dict() | {
            "device": "cpu" if choice.index is None else f"cuda:{choice.index}",
            "preferred_gpu": machine.gpus.index(choice.gpu) if choice.gpu else None,
            "why": choice.why,
        }
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
        "memory_gb": chip.memory_gb or "the system's",
        "bandwidth_gb_s": chip.bandwidth,
        "compute_units": chip.cus,
        "clock_ghz": chip.clock,
        "devices": chip.devices,
        "peak_tflops": {name: round(peak, 1) for name in ELEMENTS if (peak := chip.peak(name)) is not None},
        "operations_per_byte": {
            name: round(balance) for name in ("bf16", "fp8") if (balance := chip.balance(name)) is not None
        },
        **_arch_dict(chip.arch),
        "evidence": [chip.evidence, *facts.evidence],
    }


def cpu_dict(chip: CpuChip) -> dict[str, Any]:
    """A processor's row with computed peaks (TFLOPS, TOPS) of all its cores."""
    peaks = {name: round(peak, 1) for name in ELEMENTS if (peak := chip.peak(name)) is not None}
    return {
        "name": chip.name,
        "architecture": chip.microarchitecture,
        "cores": chip.cores,
        "clock_ghz": chip.clock,
        "bandwidth_gb_s": chip.bandwidth,
        "peak_tflops": peaks,
        "evidence": [chip.evidence],
    }


def _arch_dict(name: str) -> dict[str, Any]:
    facts = architecture(name)
    values = {
        "wave": facts.wave,
        "lds_kib": facts.lds_kib,
        "lds_workgroup_kib": facts.lds_workgroup_kib,
        "matrix_unit": facts.matrix or "none",
        "native": [element for element in ELEMENTS[1:] if facts.native(element)],
        "fp8": facts.fp8 or "emulated (ocp)",
        "mx": "native" if facts.mx else "emulated",
    }
    if facts.vendor == "amd":
        values |= {
            "pytorch_wheels": {"yes": "yes", "newest": "only the newest", "no": "no: AMD's own wheels"}[facts.pytorch],
            "fused_attention": {"flag": "with TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL=1"}.get(facts.sdpa, facts.sdpa),
            "override": f"HSA_OVERRIDE_GFX_VERSION={facts.override} only where torch lacks {name}"
            if facts.override
            else "do not set HSA_OVERRIDE_GFX_VERSION",
            "rocm": facts.rocm,
        }
    return values


def facts_of(name: str) -> dict[str, Any]:
    """All that is known of a chip, a processor, or an architecture.  Raises HardwareError with the nearest names."""
    plain = name.lower().partition(":")[0]
    if plain in ARCHITECTURES or plain.startswith(("gfx", "sm_")):
        facts = architecture(plain)
        return {
            "architecture": facts.name,
            "family": facts.family,
            "ops_per_clock_cu": dict(facts.ops),
            **_arch_dict(facts.name),
            "chips": [chip.name for chip in CHIPS if chip.arch == facts.name],
            "evidence": list(facts.evidence),
        }
    for processor in CPUS:
        if plain in (processor.name.lower(), f"amd {processor.name.lower()}") and plain != "ryzen ai max+ 395":
            return cpu_dict(processor)
    return chip_dict(find_chip(name))


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {item}" for key, item in value.items())
    if isinstance(value, list):
        lines = f"\n{'':<23}" if any("; " in str(item) for item in value) else ", "
        return lines.join(map(str, value))
    return str(value)


def chip_table() -> list[str]:
    """One line a chip: memory, bandwidth, dense peaks, and the weakest evidence behind them."""
    heads = "".join(f"{name:>8}" for name in ELEMENTS)
    lines = [f"{'chip':<24}{'arch':<9}{'GB':>5}{'GB/s':>7}{'CU':>5}{heads}  evidence"]
    for chip in CHIPS:
        peaks = [chip.peak(name) for name in ELEMENTS]
        cells = "".join(f"{'-' if peak is None else format(peak, '.0f'):>8}" for peak in peaks)
        memory = f"{chip.memory_gb:.0f}" if chip.memory_gb else "sys"
        lines.append(
            f"{chip.name:<24}{chip.arch:<9}{memory:>5}{chip.bandwidth:>7.0f}{chip.cus:>5}{cells}  {chip.evidence[0]}"
        )
    for processor in CPUS:
        peaks = [processor.peak(name) for name in ELEMENTS]
        cells = "".join(f"{'-' if peak is None else format(peak, '.1f'):>8}" for peak in peaks)
        name = processor.name if len(processor.name) < 24 else processor.name.replace("Threadripper", "TR")
        lines.append(
            f"{name:<24}{processor.microarchitecture[:8]:<9}{'sys':>5}{processor.bandwidth:>7.0f}"
            f"{processor.cores:>5}{cells}  {processor.evidence[0]}"
        )
    return [
        *lines,
        "peaks: dense TFLOPS (TOPS for int8); -: not native, emulated.  CU: cores for processors.",
        "evidence: T tested, S read in a public source, M from memory: `lumen hardware show NAME` says what and where",
    ]


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
    choice = choose(machine)
    lines += [_gpu_line(gpu, gpu is choice.gpu) for gpu in machine.gpus] or ["gpu       none found"]
    lines += [f"env       {name}={value}" for name, value in machine.environment.items()]
    lines.append(f"device    {choice.why}")
    if choice.problem is not None:
        lines.append(f"fix       {choice.problem.fix}")
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
    """What a person should know about what was found; `lumen doctor` looks at much more."""
    found = []
    override = machine.environment.get("HSA_OVERRIDE_GFX_VERSION")
    if override and machine.gpus:
        true = ", ".join(gpu.arch for gpu in machine.gpus if gpu.vendor == "amd")
        found.append(f"HSA_OVERRIDE_GFX_VERSION={override} hides the true instruction set ({true}) from kernels")
    if machine.wsl and not machine.gpus:
        found.append("WSL: the GPU, if there is one, is seen by torch only; tools for telemetry are not there")
    return found


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f}"
