"""Which GPU is taken, under which visibility variables, and when a run refuses."""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tests.helpers.machines import CPU_TORCH, CUDA_TORCH, ROCM_TORCH, amd_driver, amd_gpu, machine, put

from lumen.config import load
from lumen.core import HardwareError
from lumen.core.log import forget_notes, notes
from lumen.hardware import Gpu, Machine, View, choose, probe
from lumen.hardware.gpus import apu_memory, override_arch
from lumen.hardware.view import Node
from lumen.hardware.visibility import visible
from lumen.hardware.wheels import AMD_STABLE, PYTORCH, RELEASES, install_command
from lumen.models import device

EIGHT = tuple(Gpu("amd", i, "gfx942", "MI300X", 192 << 30, uuid=f"GPU-{i + 1:016x}") for i in range(8))


def left(vendor: str = "amd", **environment: str) -> list[int]:
    gpus = EIGHT if vendor == "amd" else tuple(replace(gpu, vendor="nvidia") for gpu in EIGHT)
    return [gpu.index for gpu in visible(gpus, environment, vendor).gpus]


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, [0, 1, 2, 3, 4, 5, 6, 7]),
        ({"HIP_VISIBLE_DEVICES": "2,3"}, [2, 3]),
        ({"CUDA_VISIBLE_DEVICES": "3"}, [3]),
        ({"HIP_VISIBLE_DEVICES": "1", "CUDA_VISIBLE_DEVICES": "3"}, [1]),
        ({"ROCR_VISIBLE_DEVICES": "4,5,6", "HIP_VISIBLE_DEVICES": "0,2"}, [4, 6]),
        ({"ROCR_VISIBLE_DEVICES": "4,5,6", "CUDA_VISIBLE_DEVICES": "1"}, [5]),
        ({"ROCR_VISIBLE_DEVICES": "2", "HIP_VISIBLE_DEVICES": "2"}, []),
        ({"ROCR_VISIBLE_DEVICES": ""}, []),
        ({"ROCR_VISIBLE_DEVICES": "GPU-0000000000000003,0"}, [2, 0]),
        ({"HIP_VISIBLE_DEVICES": "1,9,2"}, [1]),
        ({"HIP_VISIBLE_DEVICES": "1,1"}, []),
        ({"HIP_VISIBLE_DEVICES": ""}, [0, 1, 2, 3, 4, 5, 6, 7]),
        ({"HIP_VISIBLE_DEVICES": "", "CUDA_VISIBLE_DEVICES": "5"}, [5]),
    ],
)
def test_variables_compose_on_amd(environment: dict[str, str], expected: list[int]) -> None:
    assert left(**environment) == expected


@pytest.mark.parametrize("value", ["0", "3,1", "1,9,2", "1,1", "-1", "", "2,-1,3", "7"])
@pytest.mark.parametrize("name", ["CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"])
def test_one_mask_agrees_with_torchs_own_parser(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch does not see which indices exist; ours stops at the first that does not."""
    for other in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        monkeypatch.delenv(other, raising=False)
    monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.version, "hip", "7.2" if name.startswith("HIP") else None)
    theirs = [int(index) for index in torch.cuda._parse_visible_devices()]
    exist = [index for i, index in enumerate(theirs) if all(earlier < 8 for earlier in theirs[: i + 1])]
    ours = left("amd" if name.startswith("HIP") else "nvidia", **{name: value})
    assert ours == exist or (name.startswith("HIP") and value == "" and ours == list(range(8)))


def test_masks_that_are_wrong_are_said() -> None:
    both = visible(EIGHT, {"ROCR_VISIBLE_DEVICES": "2", "HIP_VISIBLE_DEVICES": "2"}, "amd")
    assert not both.gpus and not both.on_purpose
    assert any("count what ROCR_VISIBLE_DEVICES left" in text for text in both.problems)
    assert any("no GPU 2 among 1" in text for text in both.problems)
    assert visible(EIGHT, {"HIP_VISIBLE_DEVICES": "-1"}, "amd").on_purpose
    assert not visible(EIGHT, {"HIP_VISIBLE_DEVICES": "0"}, "amd").problems


def seen(tmp_path: Path, name: str, version: str, **environment: str) -> Machine:
    return probe(machine(tmp_path, name), environment, version)


def test_the_choice_is_said_with_its_reason(tmp_path: Path) -> None:
    card = choose(seen(tmp_path / "a", "strix-halo-and-card", ROCM_TORCH))
    assert (card.index, card.gpu.chip if card.gpu else "") == (1, "Radeon RX 7900 XTX")
    assert card.why.startswith("cuda:1, AMD Radeon RX 7900 XTX: a discrete card comes before AMD Radeon 8060S")
    masked = choose(seen(tmp_path / "b", "mi300x", ROCM_TORCH, HIP_VISIBLE_DEVICES="3,5"))
    assert masked.index == 0 and masked.gpu is not None and masked.gpu.index == 3
    small, large = (Gpu("amd", i, "gfx1100", f"card {i}", size << 30) for i, size in enumerate((16, 24)))
    host = replace(seen(tmp_path / "c", "bare", ROCM_TORCH), gpus=(small, large), kfd=True)
    assert choose(host).index == 1 and "more memory (24 GiB) than card 0" in choose(host).why
    old = Gpu("amd", 0, "gfx1031", "RX 6700 XT", 32 << 30)
    assert "carries its architecture gfx1100 better" in choose(replace(host, gpus=(old, large))).why
    assert choose(seen(tmp_path / "d", "display-only", CPU_TORCH)).problem is None


def test_hidden_on_purpose_is_the_cpu_and_hidden_by_mistake_is_a_problem(tmp_path: Path) -> None:
    meant = choose(seen(tmp_path / "a", "mi300x", ROCM_TORCH, HIP_VISIBLE_DEVICES="-1"))
    assert meant.index is None and meant.problem is None and "meant" in meant.why
    wrong = choose(seen(tmp_path / "b", "mi300x", ROCM_TORCH, ROCR_VISIBLE_DEVICES="1", HIP_VISIBLE_DEVICES="1"))
    assert wrong.problem is not None and wrong.problem.check == "visibility"


def test_what_keeps_a_gpu_from_being_used(tmp_path: Path) -> None:
    """CPU wheel, closed nodes, no nodes in a container, a bus without a driver: each with its own fix."""
    cpu = choose(seen(tmp_path / "a", "mi300x", CPU_TORCH)).problem
    assert cpu is not None and cpu.check == "torch"
    assert cpu.fix == "pip uninstall -y torch && pip install torch --index-url https://download.pytorch.org/whl/rocm7.2"
    root = machine(tmp_path / "b", "mi300x")
    closed = View(root, {}, torch_version=ROCM_TORCH, nodes={"/dev/kfd": Node(109, 0o660, False)})
    nodes = choose(probe(closed)).problem
    assert nodes is not None and "usermod -aG render,video" in nodes.fix
    put(root, ".dockerenv", "")
    inside = choose(probe(closed)).problem
    assert inside is not None and "--device=/dev/kfd" in inside.fix and "--group-add" in inside.fix
    (root / "dev/kfd").unlink()
    missing = choose(probe(View(root, {}, torch_version=ROCM_TORCH))).problem
    assert missing is not None and "--device=/dev/kfd" in missing.fix
    bus = tmp_path / "c"
    put(bus, "sys/bus/pci/devices/0000:05:00.0/vendor", "0x1002\n")
    put(bus, "sys/bus/pci/devices/0000:05:00.0/class", "0x120000\n")
    driver = choose(probe(bus, {}, ROCM_TORCH)).problem
    assert driver is not None and driver.check == "amd-driver"
    unseen = choose(seen(tmp_path / "d", "mi300x", ROCM_TORCH), [])
    assert unseen.problem is not None and "does not see it" in unseen.problem.what
    only_kfd = tmp_path / "e"
    put(only_kfd, "dev/kfd", "")
    refused = choose(probe(only_kfd, {}, CPU_TORCH)).problem
    assert refused is not None and refused.check == "torch" and "/dev/kfd is there" in refused.what


def test_a_gpu_that_torch_has_no_code_for(tmp_path: Path) -> None:
    amd_driver(tmp_path)
    amd_gpu(tmp_path, 1, 100301, 40, 12 << 30, simd_per_cu=2)
    host = probe(tmp_path, {}, ROCM_TORCH)
    problem = choose(host, host.gpus, ["gfx1030", "gfx1100"]).problem
    assert problem is not None and "export HSA_OVERRIDE_GFX_VERSION=10.3.0" in problem.fix
    disguised = probe(tmp_path, {"HSA_OVERRIDE_GFX_VERSION": "10.3.0"}, ROCM_TORCH)
    assert choose(disguised, disguised.gpus, ["gfx1030", "gfx1100"]).index == 0
    assert override_arch("10.3.0") == "gfx1030" and override_arch("9.0.10") == "gfx90a" and override_arch("x") == ""


def test_memory_of_an_apu_is_the_larger_pool_never_the_sum() -> None:
    assert apu_memory(512 << 20, 62 << 30, "6.14.0-29-generic") == 62 << 30
    assert apu_memory(96 << 30, 15 << 30, "6.14.0") == 96 << 30
    assert apu_memory(512 << 20, 62 << 30, "6.8.0-31-generic") == 512 << 20, "before Linux 6.10 only the cut-out part"


def pretend(monkeypatch: pytest.MonkeyPatch, machine: Machine, *gpus: SimpleNamespace) -> None:
    """A torch that reports these GPUs on that machine."""
    monkeypatch.setattr(device, "probe", lambda: machine)
    monkeypatch.setattr(torch.version, "hip", "7.2" if gpus else None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(gpus))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(gpus))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: gpus[index])
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["gfx1100", "gfx1151"])
    forget_notes()


def torch_gpu(arch: str, bus: int, memory: int) -> SimpleNamespace:
    return SimpleNamespace(
        name="AMD Radeon Graphics", gcnArchName=arch, total_memory=memory, multi_processor_count=20,
        pci_domain_id=0, pci_bus_id=bus, pci_device_id=0, is_integrated=0, major=11, minor=0,
    )  # fmt: skip


def test_auto_takes_the_discrete_card_behind_the_apu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    host = seen(tmp_path, "strix-halo-and-card", ROCM_TORCH)
    apu, card = torch_gpu("gfx1151", 0x77, 64 << 30), torch_gpu("gfx1100", 3, 24 << 30)
    pretend(monkeypatch, host, apu, card)
    assert device.choose_device() == torch.device("cuda", 1)
    assert any("cuda:1, AMD Radeon RX 7900 XTX: a discrete card comes before" in line for line in notes())
    pretend(monkeypatch, host, torch_gpu("gfx1100", 3, 24 << 30))  # HIP_VISIBLE_DEVICES=1: one left, it is cuda:0
    assert device.choose_device() == torch.device("cuda", 0)


def test_auto_refuses_the_cpu_where_a_gpu_is_there_and_takes_it_when_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A CPU wheel over ROCm: train refuses with the exact command, unless `use_cpu: true` or `device: cpu`."""
    pretend(monkeypatch, seen(tmp_path, "mi300x", CPU_TORCH))
    with pytest.raises(HardwareError) as refused:
        device.choose_device("auto")
    assert "whl/rocm7.2" in refused.value.fix and "use_cpu: true" in refused.value.fix
    assert device.choose_device("cpu") == torch.device("cpu")
    with pytest.raises(HardwareError, match="cannot use it"):
        device.choose_device("cuda")
    values = ["model_name_or_path=m", "dataset=d.jsonl", f"output_dir={tmp_path / 'o'}", "use_cpu=true"]
    assert load(None, values).run.device == "cpu"


def test_wsl_trains_and_a_gpu_build_that_sees_nothing_is_no_silent_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = seen(tmp_path, "wsl", ROCM_TORCH)
    pretend(monkeypatch, host, torch_gpu("gfx1100", 3, 24 << 30))
    assert device.choose_device() == torch.device("cuda", 0)
    pretend(monkeypatch, host)
    with pytest.raises(HardwareError, match="/dev/dxg"):
        device.choose_device()
    pretend(monkeypatch, seen(tmp_path, "wsl", CPU_TORCH))
    assert device.choose_device() == torch.device("cpu") and any("/dev/dxg" in line for line in notes())


def test_the_install_command_fits_the_gpu_and_the_setup_scripts_addresses() -> None:
    assert "whl/rocm6.4" in install_command("amd", "gfx90a", "6.4.1-83")
    assert install_command("amd", "gfx1103").endswith('"torch[device-gfx1103]"')
    assert "device-gfx1151" in install_command("amd", "gfx1151", "10.1.0")
    assert install_command("nvidia") == "pip uninstall -y torch && pip install torch"
    tree = ast.parse((Path(__file__).parents[2] / "scripts" / "setup_torch.py").read_text())
    values = {
        node.targets[0].id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    assert ast.literal_eval(values["PYTORCH"]) == PYTORCH and ast.literal_eval(values["AMD_STABLE"]) == AMD_STABLE
    releases = values["PYTORCH_ROCM"]
    assert isinstance(releases, ast.Dict)
    assert tuple(ast.literal_eval(key) for key in releases.keys if key) == RELEASES


def test_nvidia_masks_follow_cuda(tmp_path: Path) -> None:
    assert choose(seen(tmp_path / "a", "nvidia", CUDA_TORCH)).index == 0
    assert choose(seen(tmp_path / "b", "nvidia", CUDA_TORCH, CUDA_VISIBLE_DEVICES="")).problem is None
    assert choose(seen(tmp_path / "c", "nvidia", CUDA_TORCH, CUDA_VISIBLE_DEVICES="4")).problem is not None
