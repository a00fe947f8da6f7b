"""A whole tiny run through `lumen train`: what it leaves, what PEFT and transformers make of it, the plan it prints."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from tests.helpers import run_config, run_values, tiny_tokenizer

import lumen
from lumen.cli.main import run as command
from lumen.core.errors import ConfigError
from lumen.monitor.records import read_records
from lumen.trainer.best import Best
from lumen.trainer.run import RunResult
from lumen.trainer.train import run_training


def train(folder: Path, **overrides: Any) -> RunResult:
    return run_training(run_config(folder, **overrides), resolved="# resolved\n")


def ids_of(text: str) -> torch.Tensor:
    return torch.tensor([tiny_tokenizer()(text)["input_ids"]])


def test_lumen_train_leaves_everything_and_peft_loads_the_adapter(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    values = run_values(tmp_path, val_size=6, eval_strategy="epoch", plot_loss=True, run_name="first")
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(values))
    result = lumen.train(tmp_path / "run.yaml", learning_rate=2e-2)
    out = tmp_path / "out"
    said = capsys.readouterr().err
    assert result.exit_code == 0 and result.steps == 8 and result.output_dir == out
    names = {path.name for path in out.iterdir()}
    assert names >= {
        "adapter_config.json", "adapter_model.safetensors", "tokenizer.json", "chat_template.jinja", "README.md",
        "config.yaml", "run.json", "metrics.jsonl", "loss.png", "all_results.json", "train_results.json",
        "eval_results.json", "data_report.json", "checkpoint-8",
    }  # fmt: skip
    assert not [n for n in names if "tmp" in n or "part" in n]
    assert yaml.safe_load((out / "config.yaml").read_text())["learning_rate"] == 2e-2
    assert json.loads((out / "run.json").read_text())["parameters"]["trainable"] > 0
    records = read_records(out / "metrics.jsonl")
    assert [r["step"] for r in records if "train/loss" in r] == list(range(1, 9))
    held = [r["eval/loss"] for r in records if "eval/loss" in r]
    assert len(held) == 2 and held[-1] < held[0] and result.metrics["eval_loss"] == held[-1]
    assert "held-out loss" in said and "next:  lumen chat" in said and "reading (" in said
    assert result.metrics["train_tokens"] == records[-2]["train/tokens_total"] > 0

    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    ids = ids_of("count from 3")
    plain = base(ids).logits
    loaded = PeftModel.from_pretrained(base, str(out)).eval()
    from lumen.models.load import load_model

    ours = load_model(run_config(tmp_path), dtype=torch.float32, device="cpu")
    from lumen.adapters.load import load_adapter

    load_adapter(ours, str(out))
    with torch.no_grad():
        torch.testing.assert_close(loaded(ids).logits, ours.model.eval()(ids).logits, rtol=1e-5, atol=1e-5)
        assert (loaded(ids).logits - plain).abs().max() > 1e-3
    checkpoint = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32), str(out / "checkpoint-8")
    )
    with torch.no_grad():
        assert torch.equal(checkpoint.eval()(ids).logits, loaded(ids).logits)


@pytest.mark.parametrize("recipe", ["bf16", "int8", "int8-weight-only"])
@pytest.mark.parametrize("method", ["lora", "full", "freeze"])
def test_methods_and_recipes_learn_and_load_in_transformers(tmp_path: Path, method: str, recipe: str) -> None:
    if recipe == "int8-weight-only" and method == "full":
        pytest.skip("frozen codes cannot be trained; the configuration refuses it")
    options: dict[str, Any] = {"bf16": True} if recipe != "bf16" else {}
    rate = 2e-2 if method == "lora" else 5e-3
    result = train(
        tmp_path, finetuning_type=method, quant={"recipe": recipe}, learning_rate=rate, lora_dropout=0.0, **options
    )
    records = read_records(result.output_dir / "metrics.jsonl")
    assert records[-1]["train/loss"] < records[0]["train/loss"] - 0.1
    if method != "lora":
        from transformers import AutoModelForCausalLM

        loaded, info = AutoModelForCausalLM.from_pretrained(result.output_dir, output_loading_info=True)
        assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
        base = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=loaded.dtype)
        ids = ids_of("count from 3")
        assert (loaded(ids).logits - base(ids).logits).abs().max() > 1e-2
    assert (json.loads((result.output_dir / "run.json").read_text()).get("quantisation") is not None) == (
        recipe != "bf16"
    )


def test_the_same_run_twice_is_bit_equal(tmp_path: Path) -> None:
    one = train(tmp_path)
    two = train(tmp_path, output_dir=str(tmp_path / "two"))
    assert one.metrics["train_loss"] == two.metrics["train_loss"]
    weights = [(r.output_dir / "adapter_model.safetensors").read_bytes() for r in (one, two)]
    assert weights[0] == weights[1]


def test_load_best_and_early_stopping(tmp_path: Path) -> None:
    """A learning rate that first helps and then destroys: the weights of the best evaluation are what is left."""
    result = train(
        tmp_path, val_size=6, eval_strategy="steps", eval_steps=1, num_train_epochs=6, learning_rate=3.0,
        lr_scheduler_type="constant", warmup_ratio=0.0, load_best_model_at_end=True, early_stopping_steps=3,
        save_steps=100, save_total_limit=1, max_grad_norm=0.0,
    )  # fmt: skip
    records = read_records(result.output_dir / "metrics.jsonl")
    held = {r["step"]: r["eval/loss"] for r in records if "eval/loss" in r}
    best = min(held, key=lambda step: held[step])
    assert result.steps == best + 3 < 24, held
    assert result.best_checkpoint == tmp_path / "out" / f"checkpoint-{best}"
    final = (tmp_path / "out" / "adapter_model.safetensors").read_bytes()
    assert final == (result.best_checkpoint / "adapter_model.safetensors").read_bytes()


def test_best_follows_the_metric_that_was_named() -> None:
    from lumen.checkpoint import TrainState
    from lumen.trainer.config import RunConfig

    state = TrainState()
    best = Best(RunConfig(metric_for_best_model="eval_accuracy", early_stopping_steps=2), state)
    metrics = [{"eval/accuracy": a, "eval/loss": 1.0, "eval/perplexity": 2.0} for a in (0.5, 0.6, 0.4, math.nan)]
    assert [best.update(m, i) for i, m in enumerate(metrics)] == [True, True, False, False]
    assert best.should_stop and state.best_step == 1 and state.best_metric == 0.6
    with pytest.raises(ConfigError, match="is not measured"):
        Best(RunConfig(metric_for_best_model="eval_rouge"), state)


def test_dry_run_prints_the_plan_and_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    values = run_values(tmp_path, val_size=6, bf16=True, quant={"recipe": "int8"})
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(values))
    assert command(["train", str(tmp_path / "run.yaml"), "--dry-run", "num_train_epochs=3"]) == 0
    printed = capsys.readouterr().out
    for expected in (
        "8,192 of 47,264 parameters train (17.33 %)", "recipe         int8", "cpu, bfloat16", "32 rows to train on",
        "6 held out", "steps          12 (4 an epoch), warm-up 2", "8 rows a step", "total", "native",
    ):  # fmt: skip
        assert expected in printed, expected
    assert not (tmp_path / "out").exists()


def test_mistakes_are_told_without_a_traceback(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    values = run_values(tmp_path)
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(values))
    for word, expected in (
        ("lora_rnak=8", "did you mean `lora_rank`"),
        ("optim=paged_adamw_8bit", "paged_adamw_8bit"),
        ("dataset=nowhere.jsonl", "nowhere.jsonl"),
        ("output_dir=", "output_dir"),
        ("resume_from_checkpoint=nowhere", "no checkpoint nowhere"),
    ):
        assert command(["train", str(tmp_path / "run.yaml"), word]) == 2, word
        said = capsys.readouterr().err
        assert expected in said and "Traceback" not in said, said


def test_fp16_trains(tmp_path: Path) -> None:
    result = train(tmp_path, fp16=True, learning_rate=2e-2)
    records = read_records(result.output_dir / "metrics.jsonl")
    assert records[-1]["train/loss"] < records[0]["train/loss"] - 0.1
    assert records[-1]["train/loss_scale"] >= 1.0


@pytest.mark.slow
def test_compiled_layers_give_the_same_losses(tmp_path: Path) -> None:
    from lumen.models.compile import missing_compiler

    if missing_compiler("cpu"):
        pytest.skip("no C++ compiler")
    plain = train(tmp_path, max_steps=3, lora_dropout=0.0)
    compiled = train(tmp_path, max_steps=3, lora_dropout=0.0, compile="on", output_dir=str(tmp_path / "compiled"))
    assert compiled.metrics["train_loss"] == pytest.approx(plain.metrics["train_loss"], rel=1e-4)
