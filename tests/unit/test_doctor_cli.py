"""`lumen doctor` as a command: JSON, exit status, the script that is printed and never run, and this very machine."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers.machines import CPU_TORCH, machine
from tests.helpers.recorded import findings, names, open_machine

from lumen.cli import doctor as command
from lumen.cli.main import run
from lumen.core import HardwareError
from lumen.hardware import probe
from lumen.models import device


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    def replay(name: str) -> None:
        view = open_machine(name, tmp_path / name).view
        monkeypatch.setattr(command, "View", lambda: view)

    return replay


def test_exit_status_is_one_only_where_something_is_broken(on: Any, capsys: pytest.CaptureFixture[str]) -> None:
    for name, status in (("rx7900xtx", 0), ("override-spoof", 0), ("cpu-wheel-over-rocm", 1)):
        on(name)
        assert run(["doctor", "--quick"]) == status
        assert run(["doctor", "--quick", "--json"]) == status
    out = capsys.readouterr().out
    assert "BROKEN torch" in out and "pip uninstall -y torch" in out and "nothing to repair" in out


def test_a_cpu_build_over_rocm_fails_with_the_command_and_train_refuses(
    on: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The doctor and `lumen train` say the same command."""
    on("cpu-wheel-over-rocm")
    assert run(["doctor", "--quick", "--json"]) == 1
    (torch_finding,) = [f for f in json.loads(capsys.readouterr().out)["findings"] if f["check"] == "torch"]
    monkeypatch.setattr(device, "probe", lambda: probe(machine(tmp_path / "m", "mi300x"), {}, CPU_TORCH))
    with pytest.raises(HardwareError) as refused:
        device.choose_device("auto")
    assert torch_finding["status"] == "broken" and torch_finding["fix"] in refused.value.fix
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"instruction": "a", "output": "b"}\n')
    words = [f"model_name_or_path={_tiny(tmp_path)}", f"dataset={rows}", f"output_dir={tmp_path / 'o'}", "max_steps=1"]
    assert run(["train", *words]) == 2
    error = capsys.readouterr().err
    assert torch_finding["fix"] in error and "use_cpu: true" in error and "Traceback" not in error


def _tiny(folder: Path) -> Path:
    from tests.helpers import save_tiny, tiny_llama

    save_tiny(folder / "model", tiny_llama())
    return folder / "model"


def test_an_override_that_hides_gfx1151_is_warned_about() -> None:
    _, found = findings("override-spoof")
    (finding,) = [f for f in found if f.check == "override"]
    assert finding.status == "warning" and "hides gfx1151" in finding.saw
    assert "HSA_OVERRIDE_GFX_VERSION=11.0.0" in finding.saw and finding.script == ("unset HSA_OVERRIDE_GFX_VERSION",)


def test_wsl_without_module_and_tools_is_no_failure() -> None:
    """Nothing is broken, telemetry says that it is unavailable; that training runs, test_hardware_choice holds."""
    _, found = findings("wsl-rocm")
    assert not [f for f in found if f.status in ("broken", "warning")]
    (finding,) = [f for f in found if f.check == "telemetry"]
    assert finding.status == "note" and "unavailable" in finding.saw


def test_several_cards_without_iommu_pt_are_warned_about() -> None:
    _, found = findings("four-cards-no-iommu-pt")
    (finding,) = [f for f in found if f.check == "iommu"]
    assert finding.status == "warning" and "iommu=pt" in finding.fix


@pytest.mark.skipif(shutil.which("sh") is None, reason="no shell")
@pytest.mark.parametrize("name", names())
def test_the_script_is_a_script_that_names_every_finding(name: str) -> None:
    _, found = findings(name)
    text = command.script(found)
    checked = subprocess.run(["sh", "-n"], input=text, text=True, capture_output=True, check=False)
    assert checked.returncode == 0, checked.stderr + text
    for finding in found:
        assert (f": {finding.check}: " in text) == (finding.status in ("warning", "broken"))


def test_fix_runs_nothing(on: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    on("four-cards-no-iommu-pt")
    monkeypatch.setattr(subprocess, "Popen", lambda *a, **k: pytest.fail("started a process"))
    assert run(["doctor", "--quick", "--fix"]) == 0
    assert "echo 0 | sudo tee /proc/sys/kernel/numa_balancing" in capsys.readouterr().out


def _cpuinfo(key: str) -> list[str]:
    return re.findall(rf"^{key}\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)


def test_this_machine_is_told_right_in_every_line() -> None:
    """Each line of `lumen doctor --quick --json` against /proc, /sys, lscpu, df and importlib, read here anew."""
    root = Path(__file__).parents[2]
    result = subprocess.run(
        [sys.executable, "-m", "lumen", "doctor", "--quick", "--json"],
        cwd=root, env=os.environ | {"PYTHONPATH": str(root / "src")}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    values = json.loads(result.stdout)
    saw = {f["check"]: f["saw"] for f in values["findings"]}
    status = {f["check"]: f["status"] for f in values["findings"]}
    checked = set()

    def right(check: str, *texts: str) -> None:
        for text in texts:
            assert text in saw[check], f"{check}: {text!r} not in {saw[check]!r}"
        checked.add(check)

    right("kernel", platform.release())
    flags = set(_cpuinfo("flags")[0].split())
    names = [
        name
        for name, flag in (("AVX-512", "avx512f"), ("VNNI", "avx512_vnni"), ("BF16", "avx512_bf16"))
        if flag in flags
    ]
    right("cpu-features", _cpuinfo("model name")[0], ", ".join(names) or "AVX2 only")
    assert (status["cpu-features"] == "ok") == (len(names) == 3)
    lscpu = dict(
        re.findall(r"^(.+?):\s+(.*)$", subprocess.run(["lscpu"], capture_output=True, text=True).stdout, re.MULTILINE)
    )
    per_socket, sockets = lscpu.get("Core(s) per socket", "1"), lscpu.get("Socket(s)", "1")
    right("cpu-cores", f"{int(per_socket) * int(sockets)} cores, {len(os.sched_getaffinity(0))} usable threads")
    meminfo = dict(re.findall(r"^(\w+):\s+(\d+) kB$", Path("/proc/meminfo").read_text(), re.MULTILINE))
    right("memory", f"{int(meminfo['MemTotal']) / 2**20:.1f} GiB")
    available = float(re.findall(r", ([\d.]+) GiB available", saw["memory"])[0])
    assert abs(available - int(meminfo["MemAvailable"]) / 2**20) < 4, "moves while others run"
    for check, folder in (("shared-memory", "/dev/shm"), ("disk-space", str(root))):
        total = shutil.disk_usage(folder).total
        right(check, f"{total / 2**30:.1f} GiB")
    free = float(re.match(r"([\d.]+) GiB of", saw["disk-space"])[1])  # type: ignore[index]
    assert abs(free - shutil.disk_usage(root).free / 2**30) < 4
    right("compiler", shutil.which("c++") or shutil.which("g++") or "no c++")
    right(
        "torch", f"torch {torch.__version__}", "rocm" if torch.version.hip else "cuda" if torch.version.cuda else "cpu"
    )
    assert ("kfd" in result.stdout) == Path("/dev/kfd").exists()
    if not Path("/sys/class/kfd").exists() and not Path("/proc/driver/nvidia").exists():
        right("device", "the CPU: no GPU was found")
        assert result.returncode == 0 and not {"amd", "nvidia"} & {f["group"] for f in values["findings"]}
    if shutil.which("nvidia-smi") is None and shutil.which("amd-smi") is None:
        assert "telemetry" not in saw or "not installed" in saw["telemetry"]
    import importlib.metadata as metadata

    for name in ("triton", "bitsandbytes", "flash-attn"):
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            assert name not in saw
            continue
        if name in saw:
            right(name, f"{name} {version}")
    unchecked = set(saw) - checked
    assert not unchecked or torch.cuda.is_available(), f"lines that this test does not compare: {unchecked}"
    assert values["seconds"] < 20
