"""The chips: how much memory, how fast, how many compute units, at which clock.

Data only.  Peaks are computed from the clock and the architecture's operations per clock (`Chip.peak`), and the tests
compare them with what the vendors publish.  Memory is in GB (10^9 bytes) as sold, bandwidth in GB/s, clock in GHz.
Evidence tags as in `architectures`; [S] rows cite vendor pages by way of public tables, [M] rows are from memory.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass

from lumen.core.errors import HardwareError
from lumen.hardware.architectures import Architecture, architecture, plain_name

# Tags as in `architectures`; each says which figures it is about.
VENDOR_TABLE = "S: peak TFLOPS as vendors' pages are cited in a public book on machine-learning engineering"
MI300A = "S: peak FP16 980.6 TFLOPS, a public table; memory, CU: ROCm documentation, reference/gpu-specs"
GPU_SPECS = "S: architecture, memory, CU, wave, LDS: ROCm documentation, reference/gpu-specs; M: bandwidth, clock"
REVIEWS = "S: FP32, bandwidth, INT8: published reviews; M: clock"
REVIEW_BANDWIDTH = "S: 320 GB/s, published reviews; M: clock, CU"
MEMORY = "M: from memory: confirm before relying on it"


@dataclass(frozen=True)
class Chip:
    """One product.

    name:      as the vendor sells it, without the vendor.
    arch:      its code target, a key of `ARCHITECTURES`.
    memory_gb: GB per device as the operating system lists it; 0 where it is the system's memory.
    bandwidth: peak memory bandwidth, GB/s.
    cus:       compute units (streaming multiprocessors).
    clock:     GHz at which the vendor states matrix peaks.
    vector_clock: GHz for the fp32 vector peak where the vendor uses another; 0: the same.
    devices:   how many devices the operating system sees; memory, bandwidth and cus are of all of them.
    evidence:  tag and source.
    """

    name: str
    arch: str
    memory_gb: float
    bandwidth: float
    cus: int
    clock: float
    evidence: str
    vector_clock: float = 0.0
    devices: int = 1

    @property
    def architecture(self) -> Architecture:
        """The facts of its code target."""
        return architecture(self.arch)

    def peak(self, element: str) -> float | None:
        """Dense peak in TFLOPS (TOPS for int8) of `element`; None where it is not native."""
        ops = self.architecture.ops.get(element)
        if ops is None:
            return None
        clock = self.vector_clock if element == "fp32" and self.vector_clock else self.clock
        return ops * self.cus * clock / 1000

    def balance(self, element: str) -> float | None:
        """Operations per byte of memory traffic at which `element` stops being limited by bandwidth."""
        peak = self.peak(element)
        return None if peak is None else peak * 1000 / self.bandwidth


CHIPS = (
    Chip("Instinct MI100", "gfx908", 32, 1229, 120, 1.502, MEMORY),
    Chip("Instinct MI210", "gfx90a", 64, 1638, 104, 1.7, GPU_SPECS),
    Chip("Instinct MI250", "gfx90a", 128, 3277, 208, 1.7, MEMORY, devices=2),
    Chip("Instinct MI250X", "gfx90a", 128, 3277, 220, 1.7, VENDOR_TABLE, devices=2),
    Chip("Instinct MI300A", "gfx942", 128, 5300, 228, 2.1, MI300A),
    Chip("Instinct MI300X", "gfx942", 192, 5300, 304, 2.1, VENDOR_TABLE),
    Chip("Instinct MI325X", "gfx942", 256, 6000, 304, 2.1, VENDOR_TABLE),
    Chip("Instinct MI350X", "gfx950", 288, 8000, 256, 2.2, MEMORY),
    Chip("Instinct MI355X", "gfx950", 288, 8000, 256, 2.4, VENDOR_TABLE),
    Chip("Radeon RX 7900 XTX", "gfx1100", 24, 960, 96, 2.5, GPU_SPECS),
    Chip("Radeon RX 7900 XT", "gfx1100", 20, 800, 84, 2.4, MEMORY),
    Chip("Radeon PRO W7900", "gfx1100", 48, 864, 96, 2.495, GPU_SPECS),
    Chip("Radeon PRO W7800", "gfx1100", 32, 576, 70, 2.525, MEMORY),
    Chip("Radeon RX 7800 XT", "gfx1101", 16, 624, 60, 2.43, MEMORY),
    Chip("Radeon RX 7600", "gfx1102", 8, 288, 32, 2.655, GPU_SPECS),
    Chip("Radeon 8060S", "gfx1151", 0, 256, 40, 2.9, GPU_SPECS),
    Chip("Radeon 890M", "gfx1150", 0, 120, 16, 2.9, MEMORY),
    Chip("Radeon 780M", "gfx1103", 0, 105, 12, 2.7, GPU_SPECS),
    Chip("Radeon RX 9070 XT", "gfx1201", 16, 640, 64, 2.97, REVIEWS),
    Chip("Radeon RX 9070", "gfx1201", 16, 640, 56, 2.52, MEMORY),
    Chip("Radeon AI PRO R9700", "gfx1201", 32, 640, 64, 2.92, MEMORY),
    Chip("Radeon RX 9060 XT", "gfx1200", 16, 320, 32, 3.13, REVIEW_BANDWIDTH),
    Chip("Radeon RX 9060 XT 8GB", "gfx1200", 8, 320, 32, 3.13, REVIEW_BANDWIDTH),
    Chip("Radeon RX 6900 XT", "gfx1030", 16, 512, 80, 2.25, GPU_SPECS),
    Chip("Radeon RX 6800", "gfx1030", 16, 512, 60, 2.105, MEMORY),
    Chip("A100 80GB SXM", "sm_80", 80, 2039, 108, 1.41, VENDOR_TABLE),
    Chip("GeForce RTX 3090", "sm_86", 24, 936, 82, 1.695, MEMORY),
    Chip("GeForce RTX 4090", "sm_89", 24, 1008, 128, 2.52, MEMORY),
    Chip("H100 80GB SXM", "sm_90", 80, 3350, 132, 1.83, VENDOR_TABLE, vector_clock=1.98),
    Chip("H200", "sm_90", 141, 4800, 132, 1.83, VENDOR_TABLE, vector_clock=1.98),
    Chip("B200", "sm_100", 180, 8000, 148, 1.85, MEMORY),
    Chip("GeForce RTX 5090", "sm_120", 32, 1792, 170, 2.407, MEMORY),
)

# What people and drivers also call them.
ALIASES = {
    "AI Max+ 395": "Radeon 8060S",
    "Ryzen AI Max+ 395": "Radeon 8060S",
    "Strix Halo": "Radeon 8060S",
    "Strix Point": "Radeon 890M",
    "H100": "H100 80GB SXM",
    "H100 80GB HBM3": "H100 80GB SXM",
    "A100": "A100 80GB SXM",
    "A100-SXM4-80GB": "A100 80GB SXM",
}

_NOISE = re.compile(
    r"\b(amd|nvidia|instinct|radeon|geforce|graphics|corporation|inc|oam|pro(?= w)|ai pro(?= r))\b|\(tm\)|[™®]"
)


def _plain(name: str) -> str:
    """Letters and digits of a name without the vendor's words."""
    return re.sub(r"[^a-z0-9+]", "", _NOISE.sub(" ", name.lower()))


_BY_NAME = {_plain(chip.name): chip for chip in CHIPS}
_BY_NAME |= {_plain(alias): next(chip for chip in CHIPS if chip.name == name) for alias, name in ALIASES.items()}


def match_chip(name: str) -> Chip | None:
    """The chip that a driver's or a person's name means, or None."""
    return _BY_NAME.get(_plain(name))


def find_chip(name: str) -> Chip:
    """The chip of that name ("MI300X", "AMD Radeon RX 7900 XTX").

    Raises HardwareError with the nearest names for one that is not in the table.
    """
    chip = match_chip(name)
    if chip is None:
        near = difflib.get_close_matches(_plain(name), _BY_NAME, n=3, cutoff=0.5)
        names = list(dict.fromkeys(_BY_NAME[key].name for key in near))
        raise HardwareError(
            f"no chip named {name!r} is known",
            fix=f"did you mean {' or '.join(names)}?" if names else "`lumen hardware list` names them",
        )
    return chip


def code_target(name: str) -> str:
    """The code target that a name means: `cpu`, an architecture (`gfx942:xnack-`, `sm_90`) or a chip (`MI300X`).

    Raises HardwareError with the nearest names.
    """
    plain = plain_name(name)
    if plain == "cpu":
        return "cpu"
    if plain.startswith(("gfx", "sm_")):
        return architecture(plain).name
    return find_chip(name).arch


def chips_of(arch: str) -> list[Chip]:
    """All chips of a code target, in the table's order."""
    return [chip for chip in CHIPS if chip.arch == arch]


def identify(arch: str, cus: int, memory_bytes: int, among: Iterable[Chip] = CHIPS) -> Chip | None:
    """The one chip that fits an architecture, a number of CUs and a memory size; None where none or several fit.

    Drivers of Radeon cards do not tell a product name, but these three tell most of them apart.
    """
    fitting = []
    for chip in among:
        memory = chip.memory_gb / chip.devices * 1e9
        same_memory = memory == 0 or 0.85 <= memory_bytes / memory <= 1.15
        if chip.arch == arch and chip.cus // chip.devices == cus and same_memory:
            fitting.append(chip)
    return fitting[0] if len(fitting) == 1 else None
