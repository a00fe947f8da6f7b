"""The command that installs the torch for a GPU.

Which index carries what was read in public sources in autumn 2026 (`scripts/setup_torch.py`, which does it for a
checkout, has the whole list; it must run without Lumen installed, so the addresses stand in both, and a test compares
them).
"""

from __future__ import annotations

from lumen.hardware.architectures import ARCHITECTURES
from lumen.hardware.text import version_pair

PYTORCH = "https://download.pytorch.org/whl/"
AMD_STABLE = "https://stable.repo.amd.com/rocm/whl-next/"
RELEASES = ((7, 2), (7, 1), (7, 0), (6, 4), (6, 3))
"""ROCm releases with an index of PyTorch's own, newest first."""


def install_command(vendor: str, arch: str = "", rocm: str = "") -> str:
    """Shell commands that replace torch by a build for this GPU.

    arch: the GPU's architecture, '' where unknown.  rocm: the version installed on the machine, '' where there is none.
    """
    remove = "pip uninstall -y torch && pip install"
    if vendor == "nvidia":
        return f"{remove} torch"
    facts = ARCHITECTURES.get(arch)
    version = version_pair(rocm)
    if facts is not None and (facts.pytorch == "newest" or (version is not None and version >= (10, 0))):
        return f'{remove} --index-url {AMD_STABLE} "torch[device-{arch}]"'
    release = next((r for r in RELEASES if version is None or r <= version), RELEASES[-1])
    return f"{remove} torch --index-url {PYTORCH}rocm{release[0]}.{release[1]}"
