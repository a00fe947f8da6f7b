"""Quantised models inside HF's Trainer and TRL's SFTTrainer: the losses of fake quantisation, and what they write.

int8 and fp8 train every weight (a master, quantised once a step); nf4 is frozen under a PEFT adapter.  The products
are compared in fp32, where two right implementations agree far more closely than quantisation moves the losses; bf16
autocast, the usual way to start a Trainer, is compared with the same run in bf16 alone.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from tests.helpers import tiny_llama, tiny_tokenizer
from tests.helpers.fake_quant import fake_quantise

from lumen.kernels import trace
from lumen.quant import QuantLinear, quantize

pytest.importorskip("accelerate", reason="the HF Trainer needs accelerate")
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

RECIPES = ("int8", "fp8", "nf4")
STEPS = 6
LORA = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
IDS = torch.arange(5, 37).reshape(2, 16)
has_trl = importlib.util.find_spec("trl") is not None and importlib.util.find_spec("datasets") is not None


def settings(folder: Path, **more: Any) -> dict[str, Any]:
    return {
        "output_dir": str(folder), "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2,
        "max_steps": STEPS, "learning_rate": 5e-3, "lr_scheduler_type": "constant", "logging_steps": 1,
        "save_strategy": "steps", "save_steps": STEPS // 2, "report_to": [], "disable_tqdm": True, "use_cpu": True,
        "seed": 1, "optim": "adamw_torch", "bf16": False, **more,
    }  # fmt: skip


def base(kind: str, recipe: str) -> Any:
    """ours: quantised by Lumen; fake: the definition; plain: high precision."""
    model = tiny_llama()
    if kind == "ours":
        quantize(model, recipe, frozen=recipe == "nf4")
    elif kind == "fake":
        fake_quantise(model, recipe)
    return model


def hf_trainer(model: Any, recipe: str, folder: Path, **more: Any) -> Trainer:
    if recipe == "nf4":
        torch.manual_seed(1)
        model = get_peft_model(model, LORA)
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(5, 60, (16,), generator=generator) for _ in range(8)]
    arguments = TrainingArguments(**settings(folder, **more))
    return Trainer(model, arguments, train_dataset=[{"input_ids": row, "labels": row} for row in rows])


def sft_trainer(model: Any, recipe: str, folder: Path) -> Any:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    rows = Dataset.from_list([{"text": f"count from {i}: {i} {i + 1} {i + 2}"} for i in range(8)])
    torch.manual_seed(1)
    return SFTTrainer(
        model,
        SFTConfig(**settings(folder), max_length=32, gradient_checkpointing=True),
        train_dataset=rows,
        processing_class=tiny_tokenizer(),
        peft_config=LORA if recipe == "nf4" else None,
    )


TRAINERS = [
    hf_trainer,
    pytest.param(sft_trainer, marks=pytest.mark.skipif(not has_trl, reason="TRL and datasets are not installed")),
]


def losses(trainer: Any, resume: Path | None = None) -> list[float]:
    trainer.train(resume_from_checkpoint=str(resume) if resume else None)
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


_plain: dict[Any, list[float]] = {}


def plain_losses(make: Any, recipe: str, folder: Path, **more: Any) -> list[float]:
    """The run in high precision, trained once for all recipes that share it."""
    key = (make, recipe == "nf4", *more)
    if key not in _plain:
        _plain[key] = losses(make(base("plain", recipe), recipe, folder, **more))
    return _plain[key]


def distance(one: list[float], other: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("make", TRAINERS)
def test_trains_like_fake_quantisation_and_what_it_writes_loads(make: Any, recipe: str, tmp_path: Path) -> None:
    """Wrong would be: high precision (nothing ran), codes that no step refreshed, files that only Lumen could read."""
    trainer = make(base("ours", recipe), recipe, tmp_path / "ours")
    assert sum(isinstance(m, QuantLinear) for m in trainer.model.modules()) == 14
    with trace() as calls:
        got = losses(trainer)
    fake = losses(make(base("fake", recipe), recipe, tmp_path / "fake"))
    plain = plain_losses(make, recipe, tmp_path / "plain")
    assert len(got) == STEPS
    assert distance(got, fake) < 5e-4
    assert distance(got, fake) < 0.1 * distance(got, plain)
    again = 1 if make is sft_trainer else 0  # checkpointing repeats the forward products
    assert len(calls) == (14 * (3 + again) * STEPS * 2 if recipe == "int8" else 0)

    trainer.save_model(str(tmp_path / "saved"))
    want = trainer.model.eval()(input_ids=IDS).logits
    if recipe == "nf4":
        assert (tmp_path / "saved" / "adapter_model.safetensors").stat().st_size < 100_000
        again = PeftModel.from_pretrained(base("ours", recipe), tmp_path / "saved").eval()
    else:
        again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved").eval()
        assert not torch.equal(again(input_ids=IDS).logits, want)  # high precision, until it is quantised
        quantize(again, recipe)
    assert torch.equal(again(input_ids=IDS).logits, want)

    if make is hf_trainer:
        half = tmp_path / "ours" / f"checkpoint-{STEPS // 2}"
        resumed = losses(make(base("ours", recipe), recipe, tmp_path / "resumed"), half)
        assert resumed == got


def test_bf16_autocast(tmp_path: Path) -> None:
    """int8 under `bf16: true` stays within bf16's own noise of the run in bf16, and its integer products run."""
    with trace() as calls:
        got = losses(hf_trainer(base("ours", "int8"), "int8", tmp_path / "ours", bf16=True))
    plain = plain_losses(hf_trainer, "int8", tmp_path / "plain", bf16=True)
    assert distance(got, plain) < 1e-2 and got[-1] < got[0]
    assert len(calls) == 14 * 3 * STEPS * 2
