"""The probe on recorded machines, and on this one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from tests.helpers.machines import CPU_TORCH, CUDA_TORCH, ROCM_TORCH, amd_gpu, machine, put

from lumen.cli import hardware as command
from lumen.cli.main import run
from lumen.hardware import Machine, choose, probe
from lumen.hardware.gpus import gfx_name


def seen(tmp_path: Path, name: str, torch: str = "", **environment: str) -> Machine:
    return probe(machine(tmp_path, name), environment, torch)


def test_mi300x(tmp_path: Path) -> None:
    found = seen(tmp_path, "mi300x", ROCM_TORCH)
    assert [gpu.arch for gpu in found.gpus] == ["gfx942"] * 8
    first, last = found.gpus[0], found.gpus[-1]
    assert (first.name, first.chip, first.compute_units) == ("AMD Instinct MI300X OAM", "Instinct MI300X", 304)
    assert first.memory == 206_141_652_992 and not first.shared_memory
    assert first.pci == "0000:05:00.0" and last.render_node == "renderD184"
    assert last.chip == "Instinct MI300X", "told by architecture, CUs and memory where there is no product name"
    assert found.rocm == "7.2.4-120" and found.kernel_driver == "6.12.12" and found.kfd
    assert found.torch is not None and (found.torch.kind, found.torch.toolkit) == ("rocm", "7.2.53211")
    assert choose(found).gpu is first
    assert found.cpu.microarchitecture == "Zen 4" and found.cpu.bf16 and found.cpu.int8
    assert (found.cpu.cores, found.cpu.threads) == (8, 16)


def test_a_discrete_card_comes_before_the_apu(tmp_path: Path) -> None:
    found = seen(tmp_path, "strix-halo-and-card", ROCM_TORCH)
    apu, card = found.gpus
    assert (apu.arch, apu.shared_memory, apu.chip) == ("gfx1151", True, "Radeon 8060S")
    assert apu.memory == 62 << 30, "on Linux 6.10 and later compute is served from GTT alone"
    assert (card.arch, card.shared_memory, card.chip) == ("gfx1100", False, "Radeon RX 7900 XTX")
    assert card.memory == 25_753_026_560, "memory that the card borrows from the system is not its own"
    assert choose(found).gpu is card
    assert "a discrete card comes before" in choose(found).why
    assert found.rocm == "" and found.kfd, "the kernel's driver is enough: wheels bring ROCm's libraries"


def test_a_chip_that_is_two_devices(tmp_path: Path) -> None:
    found = seen(tmp_path, "mi250x")
    assert [(gpu.arch, gpu.chip, gpu.index) for gpu in found.gpus] == [
        ("gfx90a", "Instinct MI250X", 0),
        ("gfx90a", "Instinct MI250X", 1),
    ]
    assert not found.cpu.bf16 and found.cpu.microarchitecture == "Zen 3"


def test_nvidia(tmp_path: Path) -> None:
    found = seen(tmp_path, "nvidia", CUDA_TORCH)
    (gpu,) = found.gpus
    assert (gpu.vendor, gpu.arch, gpu.chip, gpu.pci) == ("nvidia", "sm_90", "H200", "0000:18:00.0")
    assert choose(found).gpu is gpu
    assert found.torch is not None and found.torch.toolkit == "13.0"


def test_a_torch_of_the_wrong_kind_is_said(tmp_path: Path) -> None:
    found = seen(tmp_path, "mi300x", CPU_TORCH)
    problem = choose(found).problem
    assert problem is not None and "cannot use it" in problem.what
    assert "download.pytorch.org/whl/rocm7.2" in problem.fix
    assert any(problem.fix in line for line in command.describe(found))


def test_an_override_that_hides_the_chip_is_said(tmp_path: Path) -> None:
    found = seen(tmp_path, "strix-halo-and-card", ROCM_TORCH, HSA_OVERRIDE_GFX_VERSION="11.0.0", HOME="/x")
    assert found.environment == {"HSA_OVERRIDE_GFX_VERSION": "11.0.0"}
    assert any("gfx1151" in line and "11.0.0" in line for line in command.remarks(found))


def test_containers_limits_count_not_the_machines(tmp_path: Path) -> None:
    found = seen(tmp_path / "v2", "container")
    assert (found.memory.total, found.memory.limit) == (8 << 30, "control group")
    assert found.memory.available == 6 << 30, "cached file pages are given back on demand"
    assert found.cpu.threads == 2, "a quota of 2.5 CPUs"
    old = seen(tmp_path / "v1", "container-v1")
    assert (old.memory.total, old.memory.available) == (4 << 30, 3 << 30)
    assert old.cpu.threads == 4, "an affinity mask of 0-1,8-9"


def test_wsl_and_nothing(tmp_path: Path) -> None:
    found = seen(tmp_path / "wsl", "wsl", ROCM_TORCH)
    assert found.wsl and not found.gpus and not found.kfd and found.cpu.microarchitecture == "Zen 5"
    assert any("WSL" in line for line in command.remarks(found))
    bare = seen(tmp_path / "bare", "bare")
    assert bare.torch is None and bare.compiler == "" and bare.memory.total == 0 and not bare.gpus
    assert command.describe(bare)


def test_an_architecture_that_is_not_in_the_table_is_still_named(tmp_path: Path) -> None:
    amd_gpu(tmp_path, 1, 120500, 64, 32 << 30)
    (gpu,) = probe(tmp_path, {}, "").gpus
    assert (gpu.arch, gpu.chip) == ("gfx1250", "")
    assert "gfx1250" in gpu.name


def test_target_versions_become_names() -> None:
    known = {90402: "gfx942", 90500: "gfx950", 90010: "gfx90a", 110501: "gfx1151", 100300: "gfx1030", 120001: "gfx1201"}
    assert {number: gfx_name(number) for number in known} == known


def test_a_compiler_is_found_as_the_environment_says(tmp_path: Path) -> None:
    for name in ("usr/bin/g++", "opt/llvm/bin/clang++"):
        put(tmp_path, name, "")
        (tmp_path / name).chmod(0o755)
    assert probe(tmp_path, {"PATH": "/nowhere:/usr/bin"}, "").compiler == "/usr/bin/g++"
    assert probe(tmp_path, {"PATH": "/usr/bin", "CXX": "/opt/llvm/bin/clang++ -O2"}, "").compiler.endswith("clang++")
    assert probe(tmp_path, {"PATH": "/nowhere"}, "").compiler == ""


def test_damaged_files_are_no_answer_and_no_crash(tmp_path: Path) -> None:
    put(tmp_path, "proc/cpuinfo", "processor: x\nflags\n\n\x00\x01")
    put(tmp_path, "proc/meminfo", "MemTotal: lots\nMemAvailable:\n")
    put(tmp_path, "sys/class/kfd/kfd/topology/nodes/1/properties", "gfx_target_version 9\nsimd_count\n")
    put(tmp_path, "sys/class/kfd/kfd/topology/nodes/x/properties", "gfx_target_version none\n")
    put(tmp_path, "proc/self/cgroup", "0::/a/b\n")
    put(tmp_path, "sys/fs/cgroup/a/cpu.max", "soon 100000\n")
    found = probe(tmp_path, {}, "no version here")
    assert found.torch is None and found.memory.total == 0


def test_this_machine_agrees_with_psutil_and_torch() -> None:
    import torch

    found = probe()
    assert found.torch is not None and found.torch.version == torch.__version__
    if found.memory.limit == "machine":
        assert found.memory.total == psutil.virtual_memory().total
    assert 0 < found.memory.available <= found.memory.total
    assert 1 <= found.cpu.threads <= len(os.sched_getaffinity(0))


def test_the_probe_does_not_import_torch() -> None:
    code = "import sys; from lumen.hardware import probe; probe(); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2] / "src")


@pytest.mark.parametrize("name", ["mi300x", "strix-halo-and-card", "nvidia", "wsl", "bare"])
def test_the_command_prints_lines_and_json(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = str(machine(tmp_path, name))
    assert run(["hardware", "--root", root]) == 0
    lines = capsys.readouterr().out
    assert run(["hardware", "--root", root, "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    for gpu in values["gpus"]:
        assert gpu["name"] in lines
    assert (values["why"] in lines and values["device"] == "cpu") or values["preferred_gpu"] is not None


def test_the_command_explains_chips(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["hardware", "list"]) == 0
    assert "Instinct MI355X" in capsys.readouterr().out
    assert run(["hardware", "show", "MI300X", "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["peak_tflops"]["fp8"] == 2614.9 and values["fp8"] == "fnuz" and values["evidence"]
    assert run(["hardware", "show", "gfx1100"]) == 0
    assert "Radeon RX 7900 XTX" in capsys.readouterr().out
    assert run(["hardware", "show", "gfx943"]) == 2
    assert "did you mean gfx942" in capsys.readouterr().err
