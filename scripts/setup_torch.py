"""Pick and install the build of torch that fits this machine.  Standard library only.

One name, `torch`, stands for builds that differ by gigabytes and by what they can drive: ROCm wheels for AMD GPUs
(about 6 GB), CUDA wheels (the default on Linux, about 3 GB with what they pull in) and CPU wheels (200 MB).  pip cannot
see a GPU, so this script looks, and tries indexes in an order:

* a torch that is there, of any build, is never replaced;
* an AMD GPU: PyTorch's index for the ROCm version of the machine, then AMD's own index with the GPU's device package
  (AMD's first where PyTorch's wheels do not carry the GPU's code, or ROCm is 10 or later).  The wheels bring their
  own ROCm libraries, so a machine with only the kernel driver counts too; its version is then unknown and the newest
  index is taken;
* an NVIDIA GPU: the plain index, whose Linux wheels are CUDA builds;
* nothing of the two: the CPU index; where it cannot be reached, the plain index.

`choose` is a pure function of what was seen (tests/unit/test_setup_torch.py holds recorded machines); everything that
touches the machine is below it.  `LUMEN_TORCH=cpu|rocm|cuda` overrides what was seen, for an image built elsewhere.

Which index carries which release was read in public sources in autumn 2026: rocm7.2 has 2.13.0, rocm7.1 ends at
2.11.0, rocm7.0 at 2.10.0, rocm6.4 and 6.3 at 2.9.1; AMD's has 2.13.0+rocm10.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import urllib.error
import urllib.request
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NamedTuple

VERSION = "2.13.0"
MINIMUM = (2, 8)
PYTORCH = "https://download.pytorch.org/whl/"
AMD_STABLE = "https://stable.repo.amd.com/rocm/whl-next/"
AMD_NIGHTLY = "https://rocm.nightlies.amd.com/whl-multi-arch/"

# ROCm release -> torch requirement on PyTorch's index of that name, newest first.
PYTORCH_ROCM = {
    (7, 2): f"torch=={VERSION}",
    (7, 1): "torch>=2.8",
    (7, 0): "torch>=2.8",
    (6, 4): "torch>=2.8",
    (6, 3): "torch>=2.8",
}
# GPU code inside PyTorch's own ROCm wheels.
PYTORCH_GFX = {"gfx908", "gfx90a", "gfx942", "gfx950", "gfx1030", "gfx1100", "gfx1101", "gfx1102"} | {
    "gfx1150",
    "gfx1151",
    "gfx1200",
    "gfx1201",
}
# Carried by AMD's wheels too (TheRock, 2026-08).  Display-only GPUs inside desktop CPUs (gfx1036) are left out on
# purpose: a 6 GB wheel would buy nothing.
AMD_GFX = PYTORCH_GFX | {"gfx1010", "gfx1011", "gfx1012", "gfx1031", "gfx1032", "gfx1034", "gfx1103", "gfx1152"}
# GPUs that share the system's memory; a discrete card beside one is taken first.
SHARED_MEMORY_GFX = {"gfx902", "gfx90c", "gfx1013", "gfx1033", "gfx1035", "gfx1036", "gfx1103"} | {
    "gfx1150",
    "gfx1151",
    "gfx1152",
    "gfx1153",
}


@dataclass(frozen=True)
class Seen:
    """What matters of a machine.

    torch:    version string of the torch that the environment sees, or None.
    amd:      architecture names of the AMD GPUs with a compute node, discrete cards first.
    rocm:     (major, minor) of the ROCm on the machine, or None.
    nvidia:   an NVIDIA driver is loaded.
    wanted:   '', 'cpu', 'rocm' or 'cuda': what the user asked for.
    """

    torch: str | None = None
    amd: tuple[str, ...] = ()
    rocm: tuple[int, int] | None = None
    nvidia: bool = False
    wanted: str = ""


@dataclass(frozen=True)
class Attempt:
    """One `pip install`: its arguments after `install`, the index to reach first ('' for the configured one), why."""

    args: tuple[str, ...]
    why: str
    index: str = ""
    gpu: bool = False


def _pytorch_rocm(rocm: tuple[int, int] | None) -> list[Attempt]:
    """PyTorch's ROCm indexes to try: the newest that is not newer than the machine's ROCm, then the ones below it."""
    fitting = [release for release in PYTORCH_ROCM if rocm is None or release <= rocm]
    return [
        Attempt(
            (PYTORCH_ROCM[release], "--index-url", f"{PYTORCH}rocm{release[0]}.{release[1]}"),
            f"AMD GPU, {f'ROCm {rocm[0]}.{rocm[1]}' if rocm else 'no ROCm installed'}: "
            f"PyTorch's wheels for ROCm {release[0]}.{release[1]}",
            f"{PYTORCH}rocm{release[0]}.{release[1]}/torch/",
            True,
        )
        for release in fitting[:2]
    ]


def _amd(gfx: str) -> list[Attempt]:
    names = ((AMD_STABLE, f"=={VERSION}", "stable"), (AMD_NIGHTLY, ">=2.8", "nightly"))
    return [
        Attempt(
            (f"torch[device-{gfx}]{pin}", "--index-url", index),
            f"AMD GPU {gfx}: AMD's own {kind} wheels",
            index,
            True,
        )
        for index, pin, kind in names
    ]


def _cpu() -> list[Attempt]:
    pin = f"torch=={VERSION}"
    return [
        Attempt((pin, "--index-url", f"{PYTORCH}cpu"), "CPU: PyTorch's CPU wheels (200 MB)", f"{PYTORCH}cpu/torch/"),
        Attempt((pin,), "CPU: the plain index (on Linux its wheel is a CUDA build and large)"),
    ]


def choose(seen: Seen) -> list[Attempt]:
    """The `pip install` attempts for a machine, in order; empty where a torch is there already.

    An attempt on a GPU machine that ends with the CPU build is the last resort, and the caller says so loudly.
    """
    if seen.torch is not None:
        return []
    wanted = seen.wanted
    if not wanted:
        if any(gfx in AMD_GFX for gfx in seen.amd):
            wanted = "rocm"
        elif seen.nvidia:
            wanted = "cuda"
        else:
            wanted = "cpu"
    if wanted == "cuda":
        return [Attempt((f"torch=={VERSION}",), "NVIDIA GPU: the plain index (CUDA wheels)", gpu=True)]
    if wanted == "cpu":
        return _cpu()
    known = [gfx for gfx in seen.amd if gfx in AMD_GFX]
    gfx = known[0] if known else (seen.amd[0] if seen.amd else "")
    own, amds = _pytorch_rocm(seen.rocm), _amd(gfx) if gfx else []
    amd_first = (bool(gfx) and gfx not in PYTORCH_GFX) or (seen.rocm is not None and seen.rocm >= (10, 0))
    attempts = amds + own if amd_first else own + amds
    return attempts if seen.wanted else attempts + _cpu()


def gfx_name(target_version: int) -> str:
    """The architecture name of KFD's gfx_target_version: decimal major·10000 + minor·100 + stepping, in hex digits.

    90402 is gfx942, 90010 gfx90a, 110501 gfx1151.
    """
    return f"gfx{target_version // 10000}{target_version // 100 % 100:x}{target_version % 100:x}"


def look(root: Path, environment: dict[str, str]) -> Seen:
    """See a machine through its files below `root`; `torch` is left to `installed_torch`."""
    found: list[tuple[bool, str]] = []
    for properties in sorted(root.glob("sys/class/kfd/kfd/topology/nodes/*/properties")):
        values = dict(line.split(None, 1) for line in _text(properties).splitlines() if " " in line)
        target = int(values.get("gfx_target_version", "0"))
        if target:
            name = gfx_name(target)
            found.append((name in SHARED_MEMORY_GFX, name))
    release = None
    for place in ("opt/rocm/.info/version", "opt/rocm/core/.info/version"):
        if match := re.match(r"(\d+)\.(\d+)", _text(root / place)):
            release = (int(match[1]), int(match[2]))
            break
    return Seen(
        amd=tuple(name for _, name in sorted(found, key=lambda pair: pair[0])),
        rocm=release,
        nvidia=(root / "proc/driver/nvidia/version").exists() or (root / "dev/nvidiactl").exists(),
        wanted=environment.get("LUMEN_TORCH", "").strip().lower(),
    )


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


class Torch(NamedTuple):
    """A torch that is installed: its version and what it was built for ('rocm', 'cuda' or 'cpu')."""

    version: str
    kind: str


def installed_torch(python: str) -> Torch | None:
    """The torch that `python` sees.  Its version file is read, not imported: importing a ROCm build takes seconds."""
    code = (
        "import importlib.metadata as m, importlib.util as u, pathlib\n"
        "spec = u.find_spec('torch')\n"
        "if spec and spec.origin:\n"
        "    print(m.version('torch')); print(pathlib.Path(spec.origin).with_name('version.py').read_text())"
    )
    result = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    version, _, source = result.stdout.partition("\n")
    return Torch(version, build_kind(source)) if version else None


def build_kind(version_py: str) -> str:
    """What a build is for, by the text of torch/version.py: the line `hip: ... = '7.2'` or `cuda: ... = '13.0'`."""
    for kind, name in (("rocm", "hip"), ("cuda", "cuda")):
        if re.search(rf"^{name}\b[^=\n]*=\s*['\"]", version_py, re.MULTILINE):
            return kind
    return "cpu"


def too_old(version: str) -> bool:
    """Whether a torch version is below what Lumen needs."""
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    return numbers < MINIMUM


def reachable(url: str, seconds: float = 5) -> bool:
    """Whether anything answers at `url`; pip's own time-outs and retries would take minutes to find out."""
    try:
        with urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=seconds):
            return True
    except urllib.error.HTTPError as error:
        return error.code < 500 and error.code != 404
    except OSError as error:  # URLError is one; a certificate that only pip knows still means that someone answered
        return "CERTIFICATE" in str(error).upper()


def install(python: str, seen: Seen) -> str:
    """Try the attempts in order; returns the version installed.  Exits with the reasons when none worked."""
    attempts, failures = choose(seen), []
    for attempt in attempts:
        print(f"torch: {attempt.why}", flush=True)
        if attempt.index and not reachable(attempt.index):
            failures.append(f"{attempt.index} cannot be reached")
            print(f"torch: {failures[-1]}; trying the next", flush=True)
            continue
        command = [python, "-m", "pip", "install", "--disable-pip-version-check", "--quiet", *attempt.args]
        if subprocess.run(command, check=False).returncode == 0 and (torch := installed_torch(python)):
            if (seen.amd or seen.nvidia) and not attempt.gpu and attempts[0].gpu:
                print(
                    "torch: WARNING: this machine has a GPU and got a build of torch that may not drive it.\n"
                    "       When the index can be reached: .venv/bin/python -m pip uninstall torch && make setup",
                    flush=True,
                )
            return torch.version
        failures.append(f"pip install {' '.join(attempt.args)} failed")
    sys.exit("torch: no build could be installed:\n  " + "\n  ".join(failures))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", default=sys.executable, help="the environment's interpreter")
    parser.add_argument("--root", default="/", help="where the machine's files are (for a recorded machine)")
    parser.add_argument(
        "--plan", action="store_true", help="print what was seen and the attempts as JSON; install nothing"
    )
    arguments = parser.parse_args()
    seen = look(Path(arguments.root), dict(os.environ))
    if seen.wanted not in ("", "cpu", "rocm", "cuda"):
        sys.exit(f"LUMEN_TORCH={seen.wanted}: expected cpu, rocm or cuda")
    torch = installed_torch(arguments.python)
    seen = replace(seen, torch=torch.version if torch else None)
    if arguments.plan:
        print(json.dumps({"seen": asdict(seen), "attempts": [asdict(attempt) for attempt in choose(seen)]}, indent=2))
        return
    if torch:
        print(f"torch: {torch.version} ({torch.kind}) is there and is kept", flush=True)
        if too_old(torch.version):
            sys.exit(f"torch: Lumen needs {MINIMUM[0]}.{MINIMUM[1]} or later; upgrade it, or use a fresh environment")
        has_gpu = any(gfx in AMD_GFX for gfx in seen.amd)
        if has_gpu and torch.kind != "rocm":
            print(
                f"torch: WARNING: this machine has an AMD GPU ({seen.amd[0]}), and this torch is not a ROCm build.\n"
                "       To change it: .venv/bin/python -m pip uninstall torch && make setup",
                flush=True,
            )
        return
    print(f"torch: installed {install(arguments.python, seen)}", flush=True)


if __name__ == "__main__":
    main()
