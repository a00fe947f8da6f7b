"""Chips as data, and the probe that says what this machine is (injectable, so tests can be any machine)."""

from lumen.hardware.architectures import ARCHITECTURES, Architecture, architecture, fp8_dialect, is_native, plain_name
from lumen.hardware.chips import CHIPS, Chip, chips_of, find_chip, match_chip
from lumen.hardware.probe import Cpu, Gpu, Machine, Memory, Torch, probe

__all__ = [
    "ARCHITECTURES",
    "CHIPS",
    "Architecture",
    "Chip",
    "Cpu",
    "Gpu",
    "Machine",
    "Memory",
    "Torch",
    "architecture",
    "chips_of",
    "find_chip",
    "fp8_dialect",
    "is_native",
    "match_chip",
    "plain_name",
    "probe",
]
