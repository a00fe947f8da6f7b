"""What each GPU architecture can do, by its *name*.

A GPU's code target (`gfx942`, `gfx1100`, `sm_90`) fixes what its compute units do per clock and which numbers they
understand.  Capability is looked up by that name and never by comparing version numbers: gfx1100 reports a capability
of 11.0, larger than Hopper's 9.0, and has no FP8 at all; gfx942 and gfx950 differ by one digit and read the same FP8
bits as different numbers.

Peak rate = operations per clock and compute unit × compute units × clock.  A fused multiply-add counts as two
operations, as in every vendor's figure; sparsity is never counted.

Evidence tags, with their source in `evidence`: [T] tested, [S] read in a public source, [M] from memory or arithmetic:
confirm before relying on it.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from lumen.core.errors import HardwareError

GPU_SPECS = "S: ROCm documentation, reference/gpu-specs (wave, LDS, CU)"
OPS_CDNA = "S: vendor peak figures divided by CU x clock"
OPS_RDNA = "M: vendor peak figures divided by CU x clock; dual issue counted"
OPS_NVIDIA = "S: vendor peak figures divided by SM x clock"


def _ops(**values: int) -> Mapping[str, int]:
    return MappingProxyType(values)


@dataclass(frozen=True)
class Architecture:
    """One code target and what a compute unit of it does.

    name:              `gfx942`, `sm_90`.
    family:            what the vendor calls the generation.
    wave:              threads that execute together.
    lds_kib:           on-chip scratch memory per CU (per WGP for RDNA, per SM for NVIDIA), KiB.
    lds_workgroup_kib: the most of it that one workgroup may use, KiB.
    matrix:            the matrix unit's instruction family; empty where there is none.
    fp8:               `fnuz` or `ocp` where FP8 matrix products are native, else None.
    ops:               operations per clock and CU by element type; a type that is missing is not native.
    shared_memory:     the GPU uses the system's memory (an APU's graphics part).
    pytorch:           how PyTorch's ROCm wheels carry it: `yes`, `newest` or `no`.
    sdpa:              fused attention in torch 2.13's wheels: `yes`, `flag` (experimental switch) or `no`.
    override:          value for HSA_OVERRIDE_GFX_VERSION that is known to help where no wheel carries the target;
                       empty: do not set it.
    """

    name: str
    family: str
    vendor: str
    wave: int
    lds_kib: int
    lds_workgroup_kib: int
    matrix: str
    fp8: str | None
    ops: Mapping[str, int]
    shared_memory: bool = False
    pytorch: str = "yes"
    sdpa: str = "yes"
    override: str = ""
    evidence: tuple[str, ...] = ()

    @property
    def rocm(self) -> str:
        """What AMD's own releases said of it in the sources at hand; '' for NVIDIA."""
        if self.vendor != "amd":
            return ""
        said = [text for text, names in ROCM_SUPPORT if self.name in names]
        return "; ".join([*said, "see AMD's compatibility matrix"])

    def native(self, element: str) -> bool:
        """Whether matrix products of `element` (fp16, bf16, int8, fp8, mxfp8, mxfp4) run without emulation."""
        return element in self.ops

    @property
    def mx(self) -> bool:
        """Whether block-scaled (MX) matrix products are native."""
        return "mxfp8" in self.ops


# fp32 is the vector rate; the others are the matrix unit's.
CDNA1 = _ops(fp32=128, fp16=1024, bf16=512, int8=1024)
CDNA2 = _ops(fp32=128, fp16=1024, bf16=1024, int8=1024)
CDNA3 = _ops(fp32=256, fp16=2048, bf16=2048, int8=4096, fp8=4096)
CDNA4 = _ops(fp32=256, fp16=4096, bf16=4096, int8=8192, fp8=8192, mxfp8=8192, mxfp4=16384)
RDNA2 = _ops(fp32=128, fp16=256, int8=512)  # packed dot products; bf16 is not there
RDNA3 = _ops(fp32=256, fp16=512, bf16=512, int8=512)
RDNA4 = _ops(fp32=256, fp16=1024, bf16=1024, int8=2048, fp8=2048)


_THEROCK = (
    *("gfx942", "gfx1030", "gfx1031", "gfx1032", "gfx1034", "gfx1035", "gfx1036", "gfx1100", "gfx1101"),
    *("gfx1102", "gfx1103", "gfx1150", "gfx1151", "gfx1152", "gfx1200", "gfx1201"),
)
ROCM_SUPPORT = (
    (
        "in the ROCm 6.4.1 support matrix [S]",
        ("gfx908", "gfx90a", "gfx942", "gfx1030", "gfx1100", "gfx1101", "gfx1200", "gfx1201"),
    ),
    ("named in the ROCm 7.2.2 release notes [S]", ("gfx950",)),
    ("release ready in TheRock, 2026-08 [S]", _THEROCK),
    ("builds in TheRock, 2026-08; qualified by the older releases [S]", ("gfx90a", "gfx950")),
)
"""What AMD's releases said, by architecture.  A matrix for ROCm 7.2 or later on Radeon and Ryzen was not found."""


def _cdna(name: str, family: str, ops: Mapping[str, int], matrix: str, fp8: str | None, lds: int = 64) -> Architecture:
    tags = (GPU_SPECS, OPS_CDNA, "T: torch 2.13 fused attention list" if name != "gfx908" else "M: gfx908 row")
    return Architecture(name, family, "amd", 64, lds, lds, matrix, fp8, ops, evidence=tags)


def _rdna(
    name: str,
    family: str,
    ops: Mapping[str, int],
    *,
    fp8: str | None = None,
    shared_memory: bool = False,
    pytorch: str = "yes",
    sdpa: str = "flag",
    override: str = "",
) -> Architecture:
    matrix = {"RDNA2": "", "RDNA4": "WMMA, SWMMAC"}.get(family, "WMMA")
    tags = (GPU_SPECS, OPS_RDNA, "M: 64 KiB of LDS per workgroup", "T: torch 2.13 fused attention list")
    return Architecture(
        name, family, "amd", 32, 128, 64, matrix, fp8, ops, shared_memory, pytorch, sdpa, override, tags
    )


def _nvidia(name: str, family: str, shared: int, ops: Mapping[str, int], fp8: str | None = None) -> Architecture:
    return Architecture(
        name, family, "nvidia", 32, shared, shared - 1, "tensor cores", fp8, ops, evidence=(OPS_NVIDIA,)
    )


_TABLE = (
    _cdna("gfx908", "CDNA1", CDNA1, "MFMA", None),
    _cdna("gfx90a", "CDNA2", CDNA2, "MFMA", None),
    _cdna("gfx942", "CDNA3", CDNA3, "MFMA, xf32", "fnuz"),
    _cdna("gfx950", "CDNA4", CDNA4, "MFMA, MFMA_SCALE", "ocp", lds=160),
    _rdna("gfx1030", "RDNA2", RDNA2, sdpa="no"),
    _rdna("gfx1031", "RDNA2", RDNA2, pytorch="no", sdpa="no", override="10.3.0"),
    _rdna("gfx1032", "RDNA2", RDNA2, pytorch="no", sdpa="no", override="10.3.0"),
    _rdna("gfx1034", "RDNA2", RDNA2, pytorch="no", sdpa="no", override="10.3.0"),
    _rdna("gfx1035", "RDNA2", RDNA2, shared_memory=True, pytorch="no", sdpa="no", override="10.3.0"),
    _rdna("gfx1036", "RDNA2", RDNA2, shared_memory=True, pytorch="no", sdpa="no", override="10.3.0"),
    _rdna("gfx1100", "RDNA3", RDNA3, sdpa="yes"),
    _rdna("gfx1101", "RDNA3", RDNA3, override="11.0.0"),
    _rdna("gfx1102", "RDNA3", RDNA3, override="11.0.0"),
    _rdna("gfx1103", "RDNA3", RDNA3, shared_memory=True, pytorch="newest", sdpa="no", override="11.0.0"),
    _rdna("gfx1150", "RDNA3.5", RDNA3, shared_memory=True),
    _rdna("gfx1151", "RDNA3.5", RDNA3, shared_memory=True),
    _rdna("gfx1152", "RDNA3.5", RDNA3, shared_memory=True, pytorch="no", sdpa="no"),
    _rdna("gfx1153", "RDNA3.5", RDNA3, shared_memory=True, pytorch="no", sdpa="no"),
    _rdna("gfx1200", "RDNA4", RDNA4, fp8="ocp"),
    _rdna("gfx1201", "RDNA4", RDNA4, fp8="ocp", sdpa="yes"),
    _nvidia("sm_80", "Ampere", 164, _ops(fp32=128, fp16=2048, bf16=2048, int8=4096)),
    _nvidia("sm_86", "Ampere", 100, _ops(fp32=256, fp16=512, bf16=512, int8=2048)),
    _nvidia("sm_89", "Ada", 100, _ops(fp32=256, fp16=512, bf16=512, int8=2048, fp8=1024), "ocp"),
    _nvidia("sm_90", "Hopper", 228, _ops(fp32=256, fp16=4096, bf16=4096, int8=8192, fp8=8192), "ocp"),
    _nvidia(
        "sm_100",
        "Blackwell",
        228,
        _ops(fp32=256, fp16=8192, bf16=8192, int8=16384, fp8=16384, mxfp8=16384, mxfp4=32768),
        "ocp",
    ),
    _nvidia(
        "sm_120",
        "Blackwell",
        100,
        _ops(fp32=256, fp16=512, bf16=512, int8=2048, fp8=1024, mxfp8=1024, mxfp4=4096),
        "ocp",
    ),
)

ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType({row.name: row for row in _TABLE})


def plain_name(name: str) -> str:
    """`gfx942:sramecc+:xnack-` → `gfx942`; the features after the colon do not change what a kernel computes."""
    return name.strip().lower().partition(":")[0]


def architecture(name: str) -> Architecture:
    """The facts of a code target.

    Raises HardwareError, with the nearest names, for one that is not in the table.
    """
    found = ARCHITECTURES.get(plain_name(name))
    if found is None:
        near = difflib.get_close_matches(plain_name(name), ARCHITECTURES, n=3, cutoff=0.5)
        raise HardwareError(
            f"no architecture named {name!r} is known",
            fix=f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(ARCHITECTURES)}",
        )
    return found


def fp8_dialect(name: str) -> str:
    """The FP8 dialect to compute with on an architecture: `fnuz` on gfx942, `ocp` everywhere else.

    An architecture without FP8 units, or one that is not known (`cpu`), emulates OCP.  Stored codes are OCP on every
    chip; this is about operands of a product.
    """
    found = ARCHITECTURES.get(plain_name(name))
    return (found.fp8 if found else None) or "ocp"


def is_native(name: str, element: str) -> bool:
    """Whether products of `element` are native on an architecture; False for one that is not known."""
    found = ARCHITECTURES.get(plain_name(name))
    return found is not None and found.native(element)
