"""On a machine with a GPU: products and training agree with the CPU.  Elsewhere every test here is skipped."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from bench.gpu_check import CASES, Case, run_case, train, write_inputs

from lumen.doctor.numeric import wrong_products

pytestmark = [
    pytest.mark.device,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU on this machine"),
]


def test_products_agree_with_fp64() -> None:
    assert wrong_products("cuda:0") == []


@pytest.fixture(scope="module")
def trained_on_cpu(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[float]]]:
    folder = tmp_path_factory.mktemp("device")
    write_inputs(folder, "tiny")
    return folder, {method: train(folder, "cpu", {}, method)[0] for method in ("full", "lora")}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_training_follows_the_cpu(case: Case, trained_on_cpu: tuple[Path, dict[str, list[float]]]) -> None:
    folder, references = trained_on_cpu
    assert run_case(case, "tiny", "cuda:0", references[case.method], folder).problems == []


def test_the_probe_sees_the_gpu_that_torch_sees() -> None:
    from lumen.hardware import choose, plain_name, probe

    usable = choose(probe()).gpu
    properties = torch.cuda.get_device_properties(0)
    arch = getattr(properties, "gcnArchName", f"sm_{properties.major}{properties.minor}")
    assert usable is not None
    if usable.arch:
        assert usable.arch == plain_name(arch)
