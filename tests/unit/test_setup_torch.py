"""Which torch a machine gets: `choose` on recorded machines, and the script as a whole where it installs nothing."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from tests.helpers.machines import CPU_TORCH, CUDA_TORCH, ROCM_TORCH, machine, put

from lumen.hardware import ARCHITECTURES
from lumen.hardware.gpus import gfx_name

SCRIPTS = Path(__file__).parents[2] / "scripts"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


setup = load("setup_torch")


def indexes(tmp_path: Path, name: str, **environment: str) -> list[str]:
    """What would be tried on a recorded machine, in order: the index, or the requirement on the configured index."""
    seen = setup.look(machine(tmp_path, name), environment)
    return [attempt.args[-1] for attempt in setup.choose(seen)]


def test_an_instinct_server_gets_the_wheels_for_its_rocm(tmp_path: Path) -> None:
    tried = indexes(tmp_path, "mi300x")
    assert tried[:2] == [setup.PYTORCH + "rocm7.2", setup.PYTORCH + "rocm7.1"]
    assert setup.AMD_STABLE in tried and tried.index(setup.AMD_STABLE) == 2
    assert tried[-2:] == [setup.PYTORCH + "cpu", "torch==2.13.0"], "the CPU build is the last resort"


def test_an_older_rocm_never_gets_newer_wheels(tmp_path: Path) -> None:
    assert indexes(tmp_path, "mi250x")[:2] == [setup.PYTORCH + "rocm6.4", setup.PYTORCH + "rocm6.3"]


def test_without_rocm_the_newest_wheels_for_the_discrete_card(tmp_path: Path) -> None:
    seen = setup.look(machine(tmp_path, "strix-halo-and-card"), {})
    assert seen.amd == ("gfx1100", "gfx1151"), "the card first, though the APU is node 1"
    attempts = setup.choose(seen)
    assert attempts[0].args == ("torch==2.13.0", "--index-url", setup.PYTORCH + "rocm7.2")
    assert "torch[device-gfx1100]==2.13.0" in {argument for attempt in attempts for argument in attempt.args}


def test_rocm_10_and_chips_outside_pytorchs_wheels_go_to_amd_first() -> None:
    ten = setup.choose(setup.Seen(amd=("gfx942",), rocm=(10, 1)))
    assert ten[0].args == ("torch[device-gfx942]==2.13.0", "--index-url", setup.AMD_STABLE)
    phoenix = setup.choose(setup.Seen(amd=("gfx1103",), rocm=(7, 2)))
    assert [attempt.args[-1] for attempt in phoenix[:3]] == [
        setup.AMD_STABLE,
        setup.AMD_NIGHTLY,
        setup.PYTORCH + "rocm7.2",
    ]


def test_other_machines(tmp_path: Path) -> None:
    assert indexes(tmp_path / "n", "nvidia") == ["torch==2.13.0"]
    cpu = [setup.PYTORCH + "cpu", "torch==2.13.0"]
    for name in ("container", "wsl", "bare", "display-only"):
        assert indexes(tmp_path / name, name) == cpu, name


def test_a_torch_that_is_there_is_never_replaced() -> None:
    for version in ("2.13.0+rocm7.2", "2.9.1+gitabcdef", "2.13.0", "1.13.1"):
        assert setup.choose(setup.Seen(torch=version, amd=("gfx942",), rocm=(7, 2))) == []
    assert setup.too_old("2.7.1+rocm6.3") and not setup.too_old("2.13.0+cpu") and not setup.too_old("3.0.0")


def test_what_the_user_wants_goes_before_what_is_seen(tmp_path: Path) -> None:
    assert indexes(tmp_path / "a", "mi300x", LUMEN_TORCH="cpu")[0] == setup.PYTORCH + "cpu"
    wanted = indexes(tmp_path / "b", "bare", LUMEN_TORCH="ROCm")
    assert wanted == [setup.PYTORCH + "rocm7.2", setup.PYTORCH + "rocm7.1"], "asked for: no CPU build behind it"


def test_builds_are_told_by_the_version_file() -> None:
    texts = {"rocm": ROCM_TORCH, "cuda": CUDA_TORCH, "cpu": CPU_TORCH}
    assert {kind: setup.build_kind(text) for kind, text in texts.items()} == {kind: kind for kind in texts}


def test_the_script_agrees_with_the_products_tables() -> None:
    """The script may not import the product, so its facts are held to the product's here."""
    amd = {name: row for name, row in ARCHITECTURES.items() if row.vendor == "amd"}
    assert {name for name in amd if name in setup.PYTORCH_GFX} == {n for n, r in amd.items() if r.pytorch == "yes"}
    assert {name for name in amd if name in setup.SHARED_MEMORY_GFX} == {n for n, r in amd.items() if r.shared_memory}
    for version in (90402, 90010, 110501, 120001):
        assert setup.gfx_name(version) == gfx_name(version)


def test_plan_prints_and_installs_nothing(tmp_path: Path) -> None:
    root = machine(tmp_path, "mi300x")
    result = subprocess.run(
        [sys.executable, str(SCRIPTS / "setup_torch.py"), "--plan", "--root", str(root)],
        capture_output=True,
        text=True,
        check=True,
    )
    plan = json.loads(result.stdout)
    assert plan["seen"]["amd"] == ["gfx942"] * 8 and plan["seen"]["rocm"] == [7, 2]
    assert plan["attempts"] == [], "this interpreter has a torch, and it stays"


class Pip:
    """Stands for pip and the network: which indexes answer, which installs work, what was asked."""

    def __init__(self, reachable: set[str], working: set[str]) -> None:
        self.reachable, self.working, self.asked = reachable, working, list[str]()
        self.torch: object = None

    def reach(self, url: str, seconds: float = 5) -> bool:
        return any(url.startswith(index) for index in self.reachable)

    def run(self, command: list[str], check: bool = False) -> subprocess.CompletedProcess[str]:
        self.asked.append(command[-1])
        fine = command[-1] in self.working
        if fine:
            self.torch = setup.Torch("2.13.0", "cpu")
        return subprocess.CompletedProcess(command, 0 if fine else 1)

    def attach(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(setup, "reachable", self.reach)
        monkeypatch.setattr(setup, "subprocess", self)
        monkeypatch.setattr(setup, "installed_torch", lambda python: self.torch)


def test_an_index_that_does_not_answer_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pip = Pip(reachable=set(), working={"torch==2.13.0"})
    pip.attach(monkeypatch)
    assert setup.install("python", setup.Seen()) == "2.13.0"
    assert pip.asked == ["torch==2.13.0"], "pip was not called for the index that cannot be reached"
    assert "cannot be reached" in capsys.readouterr().out


def test_a_gpu_machine_that_ends_with_the_cpu_build_is_warned(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pip = Pip(reachable={setup.PYTORCH}, working={setup.PYTORCH + "cpu"})
    pip.attach(monkeypatch)
    setup.install("python", setup.Seen(amd=("gfx942",), rocm=(7, 2)))
    assert pip.asked == [setup.PYTORCH + "rocm7.2", setup.PYTORCH + "rocm7.1", setup.PYTORCH + "cpu"]
    assert "WARNING" in capsys.readouterr().out


def test_no_build_at_all_names_every_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    Pip(reachable=set(), working=set()).attach(monkeypatch)
    with pytest.raises(SystemExit) as stopped:
        setup.install("python", setup.Seen())
    assert "cannot be reached" in str(stopped.value) and "pip install torch==2.13.0 failed" in str(stopped.value)


def test_lock_holds_no_torch_and_no_address() -> None:
    lines = (SCRIPTS.parent / "requirements-dev.lock").read_text().splitlines()
    pins = [line for line in lines if not line.startswith("#")]
    assert len(pins) > 40 and pins == sorted(pins)
    for line in pins:
        name, _, rest = line.partition("==")
        assert rest and name != "torch" and not name.startswith(("triton", "nvidia", "lumen", "llm-"))
        assert "://" not in line and " @ " not in line


def test_an_interpreter_without_venv_gets_a_clear_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    environment = load("setup_env")
    monkeypatch.setitem(sys.modules, "ensurepip", None)
    with pytest.raises(SystemExit) as stopped:
        environment.make_venv(tmp_path / "venv")
    assert "python3-venv" in str(stopped.value)


def test_an_environment_looks_through_to_a_gpu_torch_outside(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A ROCm container's torch is used from where it is: nothing is installed over it."""
    environment = load("setup_env")
    commands: list[tuple[str, ...]] = []
    monkeypatch.setattr(environment, "run", lambda *command: commands.append(command))
    monkeypatch.setattr(environment.setup_torch, "installed_torch", lambda _: setup.Torch("2.9.1+git1", "rocm"))
    monkeypatch.setattr(environment.setup_torch, "look", lambda *_: setup.Seen(amd=("gfx942",)))
    monkeypatch.setattr(environment.sys, "prefix", sys.base_prefix)
    environment.make_venv(tmp_path / "venv")
    assert "--system-site-packages" in commands[0] and "2.9.1+git1 (rocm)" in capsys.readouterr().out
    monkeypatch.setattr(environment.setup_torch, "installed_torch", lambda _: setup.Torch("2.9.1", "cpu"))
    environment.make_venv(tmp_path / "other")
    assert "--system-site-packages" not in commands[1], "a CPU build outside is no reason to go without the GPU"


def test_root_files_decide_not_this_machine(tmp_path: Path) -> None:
    put(tmp_path, "opt/rocm/.info/version", "7.1.0-42\n")
    assert setup.look(tmp_path, {}).rocm == (7, 1)
    put(tmp_path, "opt/rocm/.info/version", "unreadable\n")
    assert setup.look(tmp_path, {}).rocm is None
