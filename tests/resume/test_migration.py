"""A run moves between chips: saved as gfx942 (FNUZ operands), it goes on as gfx950, NVIDIA or CPU (OCP), and back.

The chip is injected (`quant.target`), so this machine computes the numbers of each.  What may differ is the rounding of
the operands that a step makes; the state that was saved holds no FP8 at all, or OCP codes.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from tests.helpers import run_config

from lumen.monitor.records import read_records
from lumen.trainer.train import run_training

STEPS = 6
OCP = ("gfx950", "sm_90", "cpu")


def train(folder: Path, out: str, target: str, *, recipe: str = "fp8", steps: int = STEPS, **more: Any) -> list[float]:
    """Losses of the steps so far, after training to `steps` as `target`; resumes what lies in `out`."""
    options = {
        "finetuning_type": "full", "learning_rate": 3e-3, "lr_scheduler_type": "constant", "warmup_ratio": 0,
        "save_steps": 1, "max_steps": steps, "output_dir": str(folder / out),
        "quant": {"recipe": recipe, "target": target}, **more,
    }  # fmt: skip
    run_training(run_config(folder, **options), resolved="# resolved\n")
    records = read_records(folder / out / "metrics.jsonl")
    return [record["train/loss"] for record in records if "train/loss" in record][:steps]


def moved(folder: Path, start: str, step: int, name: str, target: str, **more: Any) -> list[float]:
    """Go on from checkpoint `step` of run `start` as another chip."""
    out = folder / name
    out.mkdir()
    shutil.copytree(folder / start / f"checkpoint-{step}", out / f"checkpoint-{step}")
    shutil.copy(folder / start / "metrics.jsonl", out / "metrics.jsonl")
    return train(folder, name, target, **more)


def furthest(one: list[float], other: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("recipe", ["fp8", "fp8-blockwise"])
def test_a_run_saved_on_gfx942_goes_on_everywhere_and_back(tmp_path: Path, recipe: str) -> None:
    stayed = {target: train(tmp_path, target, target, recipe=recipe) for target in ("gfx942", "gfx950")}
    plain = train(tmp_path, "plain", "cpu", recipe="bf16")
    rounding = furthest(stayed["gfx942"], stayed["gfx950"])
    quantising = max(furthest(losses, plain) for losses in stayed.values())
    assert 0 < rounding < 2 * quantising  # the dialects do differ, by no more than quantising itself moves a loss

    half = STEPS // 2
    went = {target: moved(tmp_path, "gfx942", half, f"as-{target}", target, recipe=recipe) for target in OCP}
    for target, losses in went.items():
        assert losses[:half] == stayed["gfx942"][:half]
        assert losses == went["cpu"], target  # every OCP chip computes the same
        assert 0 < furthest(losses, stayed["gfx942"]) < 2 * quantising, target
    back = moved(tmp_path, "as-gfx950", half + 1, "back", "gfx942", recipe=recipe)
    assert back[: half + 1] == went["gfx950"][: half + 1]
    assert furthest(back, stayed["gfx942"]) < 2 * quantising
    again = moved(tmp_path, "gfx942", half, "again", "gfx942", recipe=recipe)
    assert again == stayed["gfx942"]  # where nothing moves, resuming is bit-equal


def test_checkpoints_hold_no_dialect(tmp_path: Path) -> None:
    """What gfx942 saves is what any chip would: not one FNUZ tensor, frozen codes equal to the byte."""
    train(tmp_path, "gfx942", "gfx942", steps=2)
    files = sorted((tmp_path / "gfx942").rglob("*.safetensors"))
    assert len(files) >= 4
    for path in files:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                assert "float8" not in str(file.get_tensor(name).dtype), (path.name, name)


def test_an_adapter_over_frozen_codes_moves_too(tmp_path: Path) -> None:
    """LoRA over frozen E4M3 codes: the codes are OCP on both chips, only the inputs' dialect changes."""
    options = {"finetuning_type": "lora", "lora_dropout": 0.0}
    stayed = train(tmp_path, "gfx942", "gfx942", **options)
    went = moved(tmp_path, "gfx942", STEPS // 2, "cpu", "cpu", **options)
    assert went[: STEPS // 2] == stayed[: STEPS // 2]
    assert 0 < furthest(went, stayed) < 5e-3 * max(stayed)


def test_the_default_target_is_the_device(tmp_path: Path) -> None:
    """Without a target the CPU computes OCP: the same bits as naming it."""
    run_training(
        run_config(tmp_path, quant={"recipe": "fp8"}, max_steps=1, output_dir=str(tmp_path / "none")), resolved="#\n"
    )
    named = train(tmp_path, "named", "cpu", steps=1, finetuning_type="lora", learning_rate=1e-2)
    records = read_records(tmp_path / "none" / "metrics.jsonl")
    assert next(r["train/loss"] for r in records if "train/loss" in r) == named[0]
