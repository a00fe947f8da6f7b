"""Two ranks on the CPU (gloo): every recipe under DDP and FSDP2 trains like one process, to the last bit or nearly.

`worker.py` runs all cases in one pair of processes; the tests read what both ranks wrote.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from tests.distributed.worker import steady_recipes

READY = steady_recipes()
ROOT = Path(__file__).parents[2]
KINDS = ("frozen", "trained")

pytestmark = pytest.mark.skipif(
    not dist.is_available() or not dist.is_gloo_available(), reason="this torch has no gloo backend"
)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What rank 0 and rank 1 found, by case."""
    folder = tmp_path_factory.mktemp("ranks")
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", str(Path(__file__).with_name("worker.py")), str(rank), str(folder)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said = [process.communicate(timeout=240)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert all(process.returncode == 0 for process in processes), "\n".join(text[-2000:] for text in said)
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]


def case(ranks: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    found = [results[name] for results in ranks]
    assert not any("error" in result for result in found), found[0].get("error") or found[1].get("error")
    return found


def check_losses(result: dict[str, Any]) -> None:
    """Each rank's loss of each step is that of the same half in one process; the steps did train."""
    for got, want in zip(result["losses"], result["reference"], strict=True):
        assert got == pytest.approx(want, rel=1e-6)
    assert result["losses"][0] != result["losses"][1]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("recipe", READY)
def test_ddp(ranks: list[dict[str, Any]], recipe: str, kind: str) -> None:
    """Codes are broadcast untouched, gradients averaged; a frozen weight that asks for a gradient would desert DDP."""
    for result in case(ranks, f"ddp {recipe} {kind}"):
        check_losses(result)
        assert result["apart"] < 1e-6


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("recipe", READY)
def test_fsdp2(ranks: list[dict[str, Any]], recipe: str, kind: str) -> None:
    """Half of the codes (or of the master) on each rank; gathered, saved, loaded, changed it is the same model."""
    for result in case(ranks, f"fsdp {recipe} {kind}"):
        check_losses(result)
        assert result["layers"] == 4 and result["sharded"]
        stores_codes = kind == "frozen" and recipe != "int8-backward"
        assert result["dtypes"] in ([["torch.uint8"], ["torch.int8"]] if stores_codes else [["torch.float32"]])
        assert result["apart"] < 1e-6  # infinite where a code differs by a bit
        assert result["output"] < 1e-6 and result["loaded"] < 1e-6
        assert result["reloaded"] < 1e-6, "codes of the weights before the load were used"


@pytest.mark.parametrize("recipe", READY)
def test_fsdp2_mixed_precision_leaves_codes_alone(ranks: list[dict[str, Any]], recipe: str) -> None:
    for result in case(ranks, f"bf16 {recipe}"):
        assert result["output"] <= 1e-2 * result["size"] and result["size"] > 0.1


@pytest.mark.parametrize("recipe", ["int8", "fp8"])
def test_our_optimizer_on_sharded_masters(ranks: list[dict[str, Any]], recipe: str) -> None:
    """lumen.optim.AdamW steps DTensors, and the codes follow."""
    for result in case(ranks, f"ours {recipe}"):
        check_losses(result)
        assert result["apart"] < 1e-6


def test_too_late_is_said(ranks: list[dict[str, Any]]) -> None:
    for result in case(ranks, "refusals"):
        assert len(result["said"]) == 3 and all("too late" in text for text in result["said"])
