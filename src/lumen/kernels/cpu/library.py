"""The C++ kernels: built when first wanted, cached, and called through a plain C interface.

`csrc/` is compiled by g++ (or $CXX, clang++, c++) into one shared library and opened with ctypes, without torch's
headers, which take longer to compile than all kernels together.  The library lies in the user's cache under a digest of
sources, compiler and flags, so a change of any of them builds anew, and an installed wheel needs no build step.

Threads are torch's: the library is linked against the very libgomp that torch has loaded, so there is one pool and
`torch.set_num_threads` holds for both.

`missing()` says in words why there is no library: another processor, no compiler, a build that failed,
LUMEN_NATIVE=off, or `switch(False)`, which is what `native_kernels: off` does.  Whoever asks falls back to plain torch:
the same result, slower.
"""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

from lumen.core.files import sha256_json
from lumen.hardware.probe import probe_cpu

SOURCES = Path(__file__).parent / "csrc"
NEEDED = ("avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_bf16", "avx512_vnni", "fma")
"""What a processor must have, as Linux names it: Zen 4 and later; Cooper Lake, Sapphire Rapids and later."""

FLAGS = (
    "-std=c++17", "-O3", "-fPIC", "-shared", "-fopenmp", "-fno-math-errno", "-fvisibility=hidden",
    "-Wno-maybe-uninitialized", "-Wno-uninitialized",
    *(f"-m{name.replace('_', '')}" for name in NEEDED),
)  # fmt: skip

Pointer, Long, Float = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


def numbers(values: list[int]) -> ctypes.Array[ctypes.c_int64]:
    """Integers as an array for C."""
    return (ctypes.c_int64 * len(values))(*values)


def cache_folder() -> Path:
    """$LUMEN_CACHE/native, $XDG_CACHE_HOME/lumen/native or ~/.cache/lumen/native."""
    if root := os.environ.get("LUMEN_CACHE"):
        return Path(root) / "native"
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "lumen" / "native"


_on = True


def switch(on: bool) -> None:
    """Allow or forbid the kernels in this process."""
    global _on
    _on = on


@functools.cache
def compiler() -> str | None:
    """Path of the C++ compiler; None where there is none."""
    for name in (os.environ.get("CXX"), "g++", "clang++", "c++"):
        if name and (found := shutil.which(name)):
            return found
    return None


def unfit() -> str:
    """Why this machine cannot run the kernels; empty where it can."""
    if not _on:
        return "native_kernels is off"
    if os.environ.get("LUMEN_NATIVE", "").lower() in ("off", "0"):
        return "LUMEN_NATIVE is off"
    if platform.system() != "Linux" or platform.machine() not in ("x86_64", "AMD64"):
        return f"not for {platform.system()} on {platform.machine()}"
    lacking = [name for name in NEEDED if name not in _flags()]
    return f"this processor has no {', '.join(lacking)}" if lacking else ""


@functools.cache
def _flags() -> frozenset[str]:
    return probe_cpu(Path("/")).flags


def missing() -> str:
    """Why the kernels cannot run here; empty where they can.  Builds the library at the first call that may."""
    return unfit() or _open()[1]


def load() -> ctypes.CDLL:
    """The library.  Call only where `missing()` is empty."""
    library = _open()[0]
    assert library is not None
    return library


@functools.cache
def _open() -> tuple[ctypes.CDLL | None, str]:
    cxx = compiler()
    if cxx is None:
        return None, "no C++ compiler (g++ or clang++)"
    try:
        return ctypes.CDLL(str(build(cxx))), ""
    except subprocess.CalledProcessError as error:
        lines = [line for line in (error.stderr or "").splitlines() if "error" in line] or [str(error)]
        return None, f"the C++ kernels do not build ({lines[0].strip()[:200]})"
    except OSError as error:
        return None, f"the C++ kernels cannot be built or opened ({error})"


def torch_openmp() -> list[str]:
    """Linker arguments for the OpenMP library that torch uses; the compiler's own where torch's is not found."""
    found = sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*"))
    found += sorted((Path(torch.__file__).parent.parent / "torch.libs").glob("libgomp*.so*"))
    return [str(found[0])] if found else ["-lgomp"]


def build(cxx: str, extra: tuple[str, ...] = ()) -> Path:
    """Compile the sources unless the cache has them; returns the library's path.

    extra: further flags (a sanitizer).  Raises CalledProcessError or OSError.
    """
    sources = sorted(SOURCES.iterdir())
    version = subprocess.run([cxx, "--version"], check=True, capture_output=True, text=True).stdout
    openmp = torch_openmp()
    key = sha256_json({"sources": {p.name: p.read_text() for p in sources}, "version": version,
                       "flags": [*FLAGS, *extra], "openmp": openmp})  # fmt: skip
    path = cache_folder() / f"lumen-{key[:20]}.so"
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        objects = []
        for source in (p for p in sources if p.suffix == ".cpp"):
            target = Path(folder) / f"{source.stem}.o"
            compile_flags = [flag for flag in (*FLAGS, *extra) if flag != "-shared"]
            _run([cxx, *compile_flags, "-c", str(source), "-o", str(target)])
            objects.append(str(target))
        # without -fopenmp, which would add the compiler's own libgomp beside torch's
        whole = Path(folder) / "whole.so"
        _run([cxx, "-shared", *extra, *objects, *openmp, "-o", str(whole)])
        whole.replace(path)
    return path


def _run(command: list[str]) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)
