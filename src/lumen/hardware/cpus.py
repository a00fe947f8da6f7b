"""CPU microarchitectures: what a core does per clock, and how a core is recognised.

The processor says its family and model number; the microarchitecture follows from these (AMD's family 25 is Zen 3 or
Zen 4 by model, family 26 is Zen 5).  Whether an instruction is usable is read from the flags of the running machine,
never from the name: a virtual machine may hide some.

Operations per clock and core count a fused multiply-add as two.  Zen 4 executes 512-bit instructions in two halves, so
AVX-512 brings it new instructions (bf16 and int8 dot products) but not twice the rate.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

MEMORY = "M: from memory"
STUDY = "T: bf16 1050 and int8 2090 GFLOP/s reached by fused kernels on two cores; rates per clock M"


@dataclass(frozen=True)
class Microarchitecture:
    """One generation of cores.

    features: the flags (as Linux names them) that matter to training and that a bare machine of it has.
    ops:      operations per clock and core by element type; a type that is missing runs as fp32.
    """

    name: str
    vendor: str
    features: tuple[str, ...]
    ops: Mapping[str, int]
    evidence: str


_AVX2 = ("avx2", "fma", "f16c")
_ZEN4 = (*_AVX2, "avx512f", "avx512bw", "avx512vl", "avx512_vnni", "avx512_bf16")

MICROARCHITECTURES = MappingProxyType(
    {
        row.name: row
        for row in (
            Microarchitecture("Zen 2", "amd", _AVX2, MappingProxyType({"fp32": 32}), MEMORY),
            Microarchitecture("Zen 3", "amd", _AVX2, MappingProxyType({"fp32": 32}), MEMORY),
            Microarchitecture("Zen 4", "amd", _ZEN4, MappingProxyType({"fp32": 32, "bf16": 64, "int8": 128}), MEMORY),
            Microarchitecture(
                "Zen 5", "amd", (*_ZEN4, "avx_vnni"), MappingProxyType({"fp32": 64, "bf16": 128, "int8": 256}), STUDY
            ),
            Microarchitecture(
                "Sapphire Rapids",
                "intel",
                (*_ZEN4, "amx_bf16", "amx_int8"),
                MappingProxyType({"fp32": 64, "bf16": 2048, "int8": 4096}),
                MEMORY,
            ),
        )
    }
)


@dataclass(frozen=True)
class CpuChip:
    """One processor: cores, the clock that all cores hold (GHz) and the memory bandwidth of a full board (GB/s)."""

    name: str
    microarchitecture: str
    cores: int
    clock: float
    bandwidth: float
    evidence: str

    def peak(self, element: str) -> float | None:
        """Peak in TFLOPS (TOPS for int8) of all cores; None where the cores have no instruction for `element`."""
        ops = MICROARCHITECTURES[self.microarchitecture].ops.get(element)
        return None if ops is None else ops * self.cores * self.clock / 1000


CPUS = (
    CpuChip("EPYC 9654", "Zen 4", 96, 3.55, 460.8, "M: 12 x DDR5-4800"),
    CpuChip("EPYC 9554", "Zen 4", 64, 3.75, 460.8, "M: 12 x DDR5-4800"),
    CpuChip("EPYC 9755", "Zen 5", 128, 3.5, 614.4, "M: 12 x DDR5-6400"),
    CpuChip("EPYC 9575F", "Zen 5", 64, 4.3, 614.4, "M: 12 x DDR5-6400"),
    CpuChip("Ryzen 9 7950X", "Zen 4", 16, 5.0, 83.2, "M: 2 x DDR5-5200"),
    CpuChip("Ryzen 9 9950X", "Zen 5", 16, 5.0, 89.6, "M: 2 x DDR5-5600"),
    CpuChip("Ryzen Threadripper PRO 7995WX", "Zen 4", 96, 3.2, 332.8, "M: 8 x DDR5-5200"),
    CpuChip("Ryzen AI Max+ 395", "Zen 5", 16, 4.0, 256.0, "M: 256-bit LPDDR5X-8000"),
)


def microarchitecture(vendor: str, family: int, model: int) -> str:
    """The name of the microarchitecture of a processor, or '' where it is not known.

    vendor: `AuthenticAMD` or `GenuineIntel`, as /proc/cpuinfo says.
    """
    if vendor == "AuthenticAMD":
        if family == 23:
            return "Zen 2" if model >= 0x30 else "Zen"
        if family == 25:
            return "Zen 4" if 0x10 <= model <= 0x1F or 0x60 <= model <= 0xAF else "Zen 3"
        if family == 26:
            return "Zen 5"
    if vendor == "GenuineIntel" and family == 6 and model in (0x8F, 0xCF):
        return "Sapphire Rapids"
    return ""
