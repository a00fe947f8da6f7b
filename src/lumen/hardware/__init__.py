"""Chips as data, the probe that says what a machine is (injectable, so tests can be any machine), and device choice."""

from lumen.hardware.architectures import ARCHITECTURES, Architecture, architecture, fp8_dialect, is_native, plain_name
from lumen.hardware.chips import CHIPS, Chip, chips_of, code_target, find_chip, match_chip
from lumen.hardware.choice import Choice, Problem, choose
from lumen.hardware.gpus import Gpu
from lumen.hardware.probe import Cpu, Machine, Memory, Torch, probe
from lumen.hardware.view import View

__all__ = [
    "ARCHITECTURES",
    "CHIPS",
    "Architecture",
    "Chip",
    "Choice",
    "Cpu",
    "Gpu",
    "Machine",
    "Memory",
    "Problem",
    "Torch",
    "View",
    "architecture",
    "chips_of",
    "choose",
    "code_target",
    "find_chip",
    "fp8_dialect",
    "is_native",
    "match_chip",
    "plain_name",
    "probe",
]
