"""Which device a run uses, and which attention it can run there."""

from __future__ import annotations

import importlib

import torch

from lumen.core import ConfigError, HardwareError, note
from lumen.models.config import ModelConfig


def choose_device(name: str = "auto") -> torch.device:
    """`auto` is the first GPU that torch sees (ROCm's are called cuda too), else the CPU.

    Raises ConfigError for a name that is no device, HardwareError for a GPU that is not there.
    """
    if name == "auto":
        return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"{name} is not a device", where="device", fix="auto, cpu, cuda or cuda:N") from error
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= count:
            raise HardwareError(
                f"device {name} is not there: torch sees {count} GPU(s)",
                where="device",
                fix="device: auto uses what there is; `lumen hardware` shows what was found",
            )
    return device


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
