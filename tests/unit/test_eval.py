"""`lumen eval`: figures against transformers' own loss, before and after, answers, and what it refuses."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers import save_tiny, tiny_llama, tiny_tokenizer

from lumen.cli.main import run as lumen
from lumen.core import ConfigError, ModelError
from lumen.data.render import prompt_ids
from lumen.eval.evaluate import evaluate
from lumen.eval.report import EvalReport, Measured, Sample
from lumen.eval.subject import Subject, check_tuned
from lumen.trainer.config import RunConfig

ROWS = [
    {"messages": [{"role": "system", "content": "Be short."}, {"role": "user", "content": "one two"},
                  {"role": "assistant", "content": "three"}]},
    {"messages": [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "how are you"},
                  {"role": "user", "content": "你好"}, {"role": "assistant", "content": "今天天气很好。"}]},
    {"messages": [{"role": "user", "content": "four"}, {"role": "assistant", "content": "five six seven"}]},
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model, an adapter of it that changes the logits, and rows."""
    from peft import LoraConfig, get_peft_model

    folder = tmp_path_factory.mktemp("eval")
    save_tiny(folder / "model")
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS), encoding="utf-8")
    model = get_peft_model(tiny_llama(), LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.data.normal_(std=0.5)
    model.peft_config["default"].base_model_name_or_path = str(folder / "model")
    model.save_pretrained(folder / "adapter")
    return folder


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("LUMEN_CACHE", str(tmp_path / "cache"))


def config(folder: Path, **values: Any) -> RunConfig:
    base = {"model_name_or_path": str(folder / "model"), "eval_dataset": [str(folder / "rows.jsonl")], "device": "cpu"}
    return RunConfig(**{**base, "do_sample": False, "max_new_tokens": 4, **values})


def reference_loss(model: Any) -> tuple[float, int]:
    """Mean loss per answer token with transformers alone, each row by itself."""
    tokenizer, total, count = tiny_tokenizer(), 0.0, 0
    for row in ROWS:
        messages = row["messages"]
        ids: list[int] = []
        learned: list[bool] = []
        for message in messages:
            head = f"<|im_start|>{message['role']}\n"
            body = f"{message['content']}<|im_end|>"
            for text, is_answer in ((head, False), (body, message["role"] == "assistant"), ("\n", False)):
                part = tokenizer(text, add_special_tokens=False)["input_ids"]
                ids += part
                learned += [is_answer] * len(part)
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([ids])).logits[0, :-1].float()
        targets, wanted = torch.tensor(ids[1:]), torch.tensor(learned[1:])
        losses = torch.nn.functional.cross_entropy(logits, targets, reduction="none")
        total += float(losses[wanted].sum())
        count += int(wanted.sum())
    return total / count, count


def test_figures_equal_those_of_transformers(folder: Path) -> None:
    report = evaluate(Subject(config(folder)))
    (found,) = report.models
    loss, tokens = reference_loss(tiny_llama())
    assert (found.label, found.tokens, report.rows) == ("model", tokens, 3)
    assert found.loss == pytest.approx(loss, rel=1e-5)
    assert found.perplexity == pytest.approx(math.exp(loss), rel=1e-5)


def test_an_adapter_gives_before_and_after(folder: Path) -> None:
    from peft import PeftModel

    report = evaluate(Subject(config(folder, adapter_name_or_path=[str(folder / "adapter")])), generate=2)
    base, tuned = report.models
    assert (base.label, tuned.label) == ("base", "tuned")
    assert base.loss == pytest.approx(reference_loss(tiny_llama())[0], rel=1e-5)
    adapted = PeftModel.from_pretrained(tiny_llama(), str(folder / "adapter"))
    assert tuned.loss == pytest.approx(reference_loss(adapted)[0], rel=1e-5)
    assert abs(tuned.loss - base.loss) > 1e-3
    assert [sorted(sample.answers) for sample in report.samples] == [["base", "tuned"]] * 2


def test_answers_are_those_of_transformers_generate_on_the_training_prompt(folder: Path) -> None:
    report = evaluate(Subject(config(folder, max_new_tokens=6)), generate=10, loss=False)
    assert report.models == [] and len(report.samples) == 3
    second = report.samples[1]
    assert [m["role"] for m in second.messages] == ["user", "assistant", "user"]
    assert (second.prompt, second.reference) == ("你好", "今天天气很好。")
    model, tokenizer = tiny_llama(), tiny_tokenizer()
    for sample in report.samples:
        ids = torch.tensor([prompt_ids(tokenizer, sample.messages)])
        made = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False)
        assert sample.answers["model"] == tokenizer.decode(made[0, ids.shape[1] :], skip_special_tokens=True)


def test_the_part_that_val_size_held_out_is_measured_and_answered(folder: Path) -> None:
    split = config(folder, eval_dataset=None, dataset=[str(folder / "rows.jsonl")], val_size=1, seed=7)
    report = evaluate(Subject(split), generate=5)
    assert report.rows == 1 and len(report.samples) == 1
    assert "seed 7" in report.data
    from lumen.data.build import build_datasets

    held = build_datasets(split, tiny_tokenizer(), seed=7).eval["eval"]
    assert report.samples[0].source == held[0].source


def test_a_full_run_is_two_models(folder: Path, tmp_path: Path) -> None:
    save_tiny(tmp_path / "run", tiny_llama(seed=3))
    report = evaluate(Subject(config(folder), check_tuned(tmp_path / "run")), generate=1)
    assert [m.label for m in report.models] == ["base", "tuned"]
    assert report.models[1].loss == pytest.approx(reference_loss(tiny_llama(seed=3))[0], rel=1e-5)
    assert [m.label for m in evaluate(Subject(config(folder), tmp_path / "run"), base=False).models] == ["tuned"]


def test_a_recipe_is_applied(folder: Path) -> None:
    plain = evaluate(Subject(config(folder))).models[0].loss
    report = evaluate(Subject(config(folder, quant={"recipe": "int8-weight-only"})))
    assert report.recipe == "int8-weight-only"
    assert 0 < abs(report.models[0].loss - plain) < 0.02


def test_the_command_on_a_model_and_an_adapter(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--data", str(folder / "rows.jsonl"), "--generate", "1", "max_new_tokens=3", "device=cpu"]
    out = tmp_path / "out"
    assert lumen(["eval", str(folder / "adapter"), *words, "--json", "--out", str(out)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [m["label"] for m in found["models"]] == ["base", "tuned"]
    assert json.loads((out / "eval.json").read_text(encoding="utf-8")) == found
    assert "Be short." in (out / "eval.html").read_text(encoding="utf-8")
    explicit = ["eval", str(folder / "model"), "--adapter", str(folder / "adapter"), *words, "--json"]
    assert lumen(explicit) == 0
    again = json.loads(capsys.readouterr().out)
    assert [m["loss"] for m in again["models"]] == [m["loss"] for m in found["models"]]
    assert lumen(["eval", str(folder / "model"), *words]) == 0
    assert "held-out loss" in capsys.readouterr().out


def test_the_command_on_a_run_finds_the_loss_that_the_run_recorded(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    words = [
        f"model_name_or_path={folder / 'model'}", f"dataset={folder / 'rows.jsonl'}", "max_steps=4", "device=cpu",
        f"eval_dataset={folder / 'rows.jsonl'}", f"output_dir={run}", "learning_rate=0.05", "save_strategy=no",
        "per_device_train_batch_size=2", "lora_rank=4", "logging_steps=1", "eval_on_start=true", "compile=off",
    ]  # fmt: skip
    assert lumen(["train", *words]) == 0
    recorded = json.loads((run / "all_results.json").read_text())
    capsys.readouterr()
    assert lumen(["eval", str(run), "--json"]) == 0
    base, tuned = json.loads(capsys.readouterr().out)["models"]
    assert tuned["loss"] == pytest.approx(recorded["eval_loss"], rel=1e-5)
    first = json.loads((run / "metrics.jsonl").read_text().splitlines()[0])
    assert base["loss"] == pytest.approx(first["eval/loss"], rel=1e-5)
    assert tuned["loss"] < base["loss"]
    assert (run / "eval" / "eval.html").is_file()
    from lumen.eval.runs import read_run

    summary = read_run(run)  # what the trainer writes is what compare reads
    assert (summary.method, summary.steps, summary.finished) == ("LoRA r=4", 4, True)
    assert summary.final == pytest.approx(recorded["eval_loss"])
    assert summary.first == pytest.approx(first["eval/loss"])
    assert summary.trainable and summary.total and summary.trainable < summary.total
    assert summary.memory and summary.tokens_per_second and summary.seconds


def test_a_llama_factory_file_with_do_eval(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "eval.yaml"
    file.write_text(
        f"model_name_or_path: {folder / 'model'}\nadapter_name_or_path: {folder / 'adapter'}\nstage: sft\n"
        f"do_predict: false\ndo_eval: true\nfinetuning_type: lora\neval_dataset: {folder / 'rows.jsonl'}\n"
        f"cutoff_len: 256\nper_device_eval_batch_size: 1\noutput_dir: {tmp_path / 'out'}\n",
        encoding="utf-8",
    )
    assert lumen(["eval", str(file), "--json", "device=cpu"]) == 0
    assert [m["label"] for m in json.loads(capsys.readouterr().out)["models"]] == ["base", "tuned"]


def test_mistakes_are_said(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="no held-out rows"):
        evaluate(Subject(config(folder, eval_dataset=None)))
    with pytest.raises(ModelError, match="without final weights"):
        check_tuned(tmp_path)
    assert lumen(["eval", str(tmp_path / "nowhere"), "--data", "x.jsonl"]) == 2
    assert "Traceback" not in capsys.readouterr().err
    assert lumen(["eval", str(folder / "model"), "--data", str(folder / "none.jsonl"), "device=cpu"]) == 2
    assert "none.jsonl" in capsys.readouterr().err


def test_the_page_escapes_what_models_write() -> None:
    measured = [Measured("model", "m<1>", 1.0, math.inf, 0.5, 10, 0.1)]
    sample = Sample([{"role": "user", "content": "a < b"}], "r & s", {"model": "<script>alert(1)</script>"})
    report = EvalReport("d", 1, "bf16", "float32", measured, [sample])
    page = report.page()
    assert "<script>" not in page and "&lt;script&gt;" in page and "a &lt; b" in page and "m&lt;1&gt;" in page
    assert report.to_dict()["models"][0]["perplexity"] == "inf"
    json.dumps(report.to_dict(), allow_nan=False)
