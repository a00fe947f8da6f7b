"""Which device a run uses, and which attention it can run there."""

from __future__ import annotations

import importlib
from dataclasses import replace

import torch

from lumen.core import ConfigError, HardwareError, note
from lumen.hardware import ARCHITECTURES, Gpu, Machine, choose, plain_name, probe
from lumen.models.config import ModelConfig


def torch_gpus(machine: Machine) -> list[Gpu]:
    """The GPUs that torch reports, in its order, each with what the machine's files say of it where they agree.

    The bus address ties the two together; a spoofed architecture (HSA_OVERRIDE_GFX_VERSION) does not fool it.
    """
    if not torch.cuda.is_available():
        return []
    found = []
    vendor = "amd" if torch.version.hip else "nvidia"
    for index in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(index)
        address = f"{getattr(facts, 'pci_domain_id', 0):04x}:{getattr(facts, 'pci_bus_id', 0):02x}:"
        address += f"{getattr(facts, 'pci_device_id', 0):02x}."
        arch = plain_name(getattr(facts, "gcnArchName", "") or f"sm_{facts.major}{facts.minor}")
        known = [gpu for gpu in machine.gpus if gpu.vendor == vendor and gpu.pci.startswith(address)]
        if len(known) == 1:
            memory = known[0].memory or facts.total_memory
            found.append(replace(known[0], arch=known[0].arch or arch, memory=memory, name=known[0].name or facts.name))
            continue
        table = ARCHITECTURES.get(arch)
        shared = bool(getattr(facts, "is_integrated", False)) or bool(table and table.shared_memory)
        found.append(
            Gpu(vendor, index, arch, facts.name, facts.total_memory, shared, int(facts.multi_processor_count or 0))
        )
    return found


def choose_device(name: str = "auto") -> torch.device:
    """The device of a run.  `auto`: the best GPU (see `hardware.choice`), said with the reason; else the CPU.

    Raises ConfigError for a name that is no device; HardwareError for a GPU that is not there, and for `auto` where a
    GPU is there that cannot be used: a run must not end up on the CPU without anybody having asked for it.
    """
    if name == "auto":
        machine = probe()
        gpus = torch_gpus(machine)
        choice = choose(machine, gpus, torch.cuda.get_arch_list() if gpus else None)
        if choice.problem is not None:
            raise HardwareError(
                choice.problem.what,
                where="device: auto",
                fix=f"{choice.problem.fix}; or set `use_cpu: true` to run on the CPU; `lumen doctor` shows more",
            )
        if machine.gpus or gpus or machine.dxg or torch.version.hip or torch.version.cuda:
            note(f"device: {choice.why}")
        return torch.device("cpu") if choice.index is None else torch.device("cuda", choice.index)
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"{name} is not a device", where="device", fix="auto, cpu, cuda or cuda:N") from error
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= count:
            problem = choose(probe(), ()).problem if not count else None
            raise HardwareError(
                f"device {name} is not there: torch sees {count} GPU(s)" + (f"; {problem.what}" if problem else ""),
                where="device",
                fix=problem.fix if problem else "device: auto uses what there is; `lumen doctor` says why",
            )
    return device


def training_gpu(device: torch.device) -> Gpu | None:
    """What is known of the GPU behind a torch device; None for the CPU."""
    if device.type != "cuda":
        return None
    gpus = torch_gpus(probe())
    return gpus[device.index or 0] if gpus else None


def describe_device(device: torch.device) -> str:
    """`cpu`, or `cuda:0 (name of the GPU)`."""
    if device.type == "cuda":
        return f"{device} ({torch.cuda.get_device_name(device)})"
    return str(device)


_FLASH = {"fa2": ("flash_attn", "flash_attention_2"), "fa3": ("flash_attn_interface", "flash_attention_3")}


def attention_implementation(config: ModelConfig, device: torch.device) -> str | None:
    """transformers' name for `flash_attn:`; None leaves the choice to the architecture (sdpa where it has one).

    A flash-attention package that is missing, broken or without a GPU falls back to sdpa with one line that says so.
    """
    if config.flash_attn == "auto":
        return None
    if config.flash_attn == "disabled":
        return "eager"
    if config.flash_attn == "sdpa":
        return "sdpa"
    package, name = _FLASH[config.flash_attn]
    reason = ""
    if device.type != "cuda":
        reason = f"it runs on GPUs, not on {device.type}"
    else:
        try:
            importlib.import_module(package)
        except Exception as error:  # a broken build raises anything, also OSError and RuntimeError
            reason = f"{package} cannot be imported ({type(error).__name__})"
    if reason:
        note(f"flash_attn: {config.flash_attn} is not available: {reason}; sdpa is used instead")
        return "sdpa"
    return name
