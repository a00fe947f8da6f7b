"""Numeric probes: what is wrong on a device is found, and what hangs or dies is a finding and not an accident."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from lumen.doctor import collective, probes
from lumen.doctor.disk import disk_speed
from lumen.doctor.numeric import PROBES, compare, measure, wrong_products
from lumen.doctor.probes import Worked, disk_finding, judge, work
from lumen.kernels import int8 as int8_kernels


def one(line: dict[str, Any]) -> Any:
    (finding,) = judge(Worked([{"step": "measured", **line}]))
    return finding


@pytest.mark.parametrize("name", list(PROBES))
def test_every_probe_holds_on_the_cpu(name: str) -> None:
    line = measure(name, "cpu")
    assert line["count"] > 0 and not line["wrong"] and not line["error"]
    assert one(line).status == "ok"


@pytest.mark.parametrize("damage", ["scaled", "one element", "nan"])
def test_a_matmul_that_is_silently_wrong_is_found(damage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only in bf16, only on the device: the reference computes in fp64 and stays right."""
    linear = torch.nn.functional.linear

    def wrong(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        out = linear(a, b)
        if a.dtype != torch.bfloat16:
            return out
        if damage == "scaled":
            return out * 1.1
        mask = torch.zeros_like(out)
        mask[3, 7] = 1
        return out + mask * (4 if damage == "one element" else float("nan"))

    monkeypatch.setattr("torch.nn.functional.linear", wrong)
    finding = one(measure("gemm", "cpu"))
    assert finding.status == "broken" and "WRONG: gemm bfloat16" in finding.saw
    assert all("bfloat16" in line for line in wrong_products("cpu"))


def test_an_attention_whose_backward_is_wrong_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    sdpa = torch.nn.functional.scaled_dot_product_attention

    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return grad * 0.9

    def wrong(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
        return sdpa(q, k if k.dtype == torch.float64 else Wrong.apply(k), v, **options)

    monkeypatch.setattr("torch.nn.functional.scaled_dot_product_attention", wrong)
    line = measure("attention", "cpu")
    assert line["wrong"] and all(" dB" in text for text in line["wrong"])
    assert one(line).status == "broken"


def test_a_wrong_integer_product_and_one_that_does_not_run_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    real = int8_kernels.int8_mm
    monkeypatch.setattr(int8_kernels, "int8_mm", lambda a, b: real(a, b) + 400)
    assert one(measure("int8", "cpu")).status == "broken"

    def missing(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no kernel image is available\nfor execution")

    monkeypatch.setattr(int8_kernels, "int8_mm", missing)
    finding = one(measure("int8", "cpu"))
    assert finding.status == "warning" and "no kernel image is available" in finding.saw and finding.fix


def test_compare_sees_nan_and_single_elements() -> None:
    expected = torch.randn(64, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert not compare("x", expected.float(), expected, 1e-4).wrong
    bad = expected.clone()
    bad[1, 1] += 0.5
    assert compare("x", bad, expected, 1e-2).wrong
    bad[1, 1] = float("nan")
    assert compare("x", bad, expected, 1e-2).wrong


def script(text: str) -> list[str]:
    return [sys.executable, "-c", text]


def test_a_device_that_hangs_is_a_finding_that_names_the_probe() -> None:
    hangs = script(
        'print(\'{"step": "start", "probe": "gemm", "device": "cuda:0"}\', flush=True)\nimport time; time.sleep(60)'
    )
    worked = work(limit=3.0, command=hangs)
    (finding,) = judge(worked)
    assert worked.code is None and finding.status == "broken" and "gemm on cuda:0" in finding.saw and finding.fix
    busy = Worked([], running="int8 on cpu", code=None)
    assert judge(busy)[0].status == "warning", "a CPU does not hang, it is busy"


def test_a_device_that_crashes_is_a_finding() -> None:
    dies = script(
        "import os, signal, sys\nprint('a library says hello')\n"
        'print(\'{"step": "start", "probe": "attention", "device": "cuda:0"}\', flush=True)\n'
        "print('Memory access fault by GPU node-1', file=sys.stderr, flush=True)\nos.kill(os.getpid(), signal.SIGABRT)"
    )
    (finding,) = judge(work(limit=10.0, command=dies))
    assert finding.status == "broken" and "signal 6" in finding.saw and "Memory access fault" in finding.saw


def test_without_torch_the_probes_are_a_note() -> None:
    (finding,) = judge(work(limit=10.0, command=script("raise ModuleNotFoundError(\"No module named 'torch'\")")))
    assert finding.status == "note"


def collected(**changes: Any) -> Any:
    line = {
        "step": "collective",
        "backend": "gloo",
        "exact": True,
        "seconds": 0.01,
        "errors": {},
        "missing": [],
        "limit": 10.0,
    }
    (finding,) = judge(Worked([line | changes]))
    return finding


def test_the_collective_is_judged_and_names_the_rank_that_is_missing() -> None:
    assert collected().status == "ok"
    late = collected(missing=[1], exact=False)
    assert late.status == "broken" and late.saw == "rank 1 did not answer within 10 s"
    assert "rank 0: RuntimeError: gloo" in collected(errors={0: "RuntimeError: gloo"}, exact=False).saw
    assert collected(exact=False).status == "broken"


def test_a_rank_that_never_comes_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    import time

    def stuck(rank: int, port: int, seconds: float, pipe: Any) -> None:
        if rank == 1:
            time.sleep(60)
        pipe.send({"rank": rank, "backend": "gloo", "exact": True, "seconds": 0.0})

    monkeypatch.setattr(collective, "_rank", stuck)
    result = collective.Collective(1.0).result()
    assert result["missing"] == [1] and not result["exact"]


def test_the_worker_tells_what_torch_sees_and_sums_over_two_ranks() -> None:
    worked = work(["collective"], limit=60.0)
    assert worked.code == 0 and not worked.running, worked.tail
    assert worked.gpus is not None and len(worked.gpus) == torch.cuda.device_count()
    (finding,) = judge(worked)
    assert (finding.check, finding.status) == ("collective", "ok")


def test_the_disk_is_measured_and_left_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lumen.doctor.disk.CHUNKS", 2)
    speed = disk_speed(tmp_path)
    assert speed.write > 0 and speed.read > 0 and speed.size == 16 << 20
    assert list(tmp_path.iterdir()) == []
    assert disk_finding(tmp_path / "nowhere").status == "warning"
    monkeypatch.setattr(probes, "disk_speed", lambda folder: type(speed)(50e6, 90e6, 1 << 20, True))
    assert disk_finding(tmp_path).status == "warning"
