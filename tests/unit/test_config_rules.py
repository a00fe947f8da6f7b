"""Rules between fields name both keys, their places and the choices."""

from __future__ import annotations

from pathlib import Path

import pytest

from lumen.config import load
from lumen.core import ConfigError
from lumen.quant import recipes

BROKEN = [
    ("quant: {recipe: nf4}\nfinetuning_type: full", ["quant.recipe: nf4", "finetuning_type: full"]),
    ("quant: int4\nfinetuning_type: full", ["quant.recipe: int4", "finetuning_type: full"]),
    ("quant: int8-weight-only\nfinetuning_type: freeze", ["quant.recipe: int8-weight-only", "finetuning_type: freeze"]),
    ("quantization_bit: 4\nfinetuning_type: full", ["quant.recipe: nf4", "finetuning_type: full"]),
    ("quantization_bit: 8\nresize_vocab: true", ["resize_vocab", "quant.recipe: int8-weight-only"]),
    ("adapter_name_or_path: a\nfinetuning_type: full", ["adapter_name_or_path", "finetuning_type"]),
    ("adapter_name_or_path: a,b\nquantization_bit: 4", ["adapter_name_or_path", "quant.recipe: nf4"]),
    ("adapter_name_or_path: a\ncreate_new_adapter: true\nquantization_bit: 4", ["create_new_adapter", "quant.recipe"]),
    ("pissa_init: true\nquantization_bit: 4", ["pissa_init", "quant.recipe"]),
    ("val_size: 0.1\neval_dataset: b\ndataset: a", ["val_size", "eval_dataset"]),
    ("val_size: 0.1", ["val_size", "dataset"]),
    ("train_on_prompt: true\nmask_history: true", ["train_on_prompt", "mask_history"]),
    ("neat_packing: true\nstage: pt", ["neat_packing", "stage: pt"]),
    ("train_on_prompt: true\nstage: pt", ["train_on_prompt", "stage: pt"]),
    ("mask_history: true\nstage: pt", ["mask_history", "stage: pt"]),
    ("neat_packing: true\npacking: false", ["neat_packing", "packing"]),
    ("interleave_probs: 0.5,0.5\ndataset: a,b", ["interleave_probs", "mix_strategy"]),
    ("interleave_probs: 0.5,0.5\ndataset: a\nmix_strategy: interleave_under", ["interleave_probs", "dataset"]),
    ("interleave_probs: -1,2\ndataset: a,b\nmix_strategy: interleave_over", ["interleave_probs"]),
    ("eval_strategy: steps", ["eval_strategy", "val_size", "eval_dataset"]),
    ("do_eval: true", ["do_eval", "val_size", "eval_dataset"]),
    ("eval_dataset: b\nload_best_model_at_end: true", ["load_best_model_at_end", "eval_strategy"]),
    ("eval_dataset: b\nearly_stopping_patience: 3", ["early_stopping_steps", "eval_strategy"]),
    (
        "eval_dataset: b\neval_strategy: steps\nload_best_model_at_end: true\nsave_only_model: true",
        ["save_only_model", "load_best_model_at_end"],
    ),
    ("bf16: true\nfp16: true", ["bf16", "fp16"]),
    ("pure_bf16: true\nfp16: true", ["pure_bf16", "fp16"]),
    ("use_dora: true\nfinetuning_type: freeze", ["use_dora", "finetuning_type: freeze"]),
    ("use_rslora: true\nfinetuning_type: full", ["use_rslora", "finetuning_type: full"]),
    ("loraplus_lr_ratio: 16\nfinetuning_type: full", ["loraplus_lr_ratio", "finetuning_type: full"]),
    ("overwrite_output_dir: true\nresume_from_checkpoint: c", ["overwrite_output_dir", "resume_from_checkpoint"]),
    ("quantization_bit: 4\nquant: int8", ["quantization_bit: 4", "quant", "int8"]),
    ("quantization_bit: 8\nquant: {recipe: nf4}", ["quantization_bit: 8", "quant.recipe: int8-weight-only", "nf4"]),
    ("quantization_bit: 4\nquant: {weight: int8:row}", ["quantization_bit: 4", "weight"]),
    ("finetuning_type: qlora\nquant: mxfp8", ["finetuning_type: qlora", "mxfp8"]),
    ("quantization_bit: 4\nquantization_type: fp4", ["quantization_type: fp4"]),
    ("quantization_bit: 4\nquantization_method: gptq", ["quantization_method: gptq"]),
    ("quantization_bit: 3", ["quantization_bit: 3"]),
    ("use_cpu: true\ndevice: cuda", ["use_cpu", "device: cuda"]),
    ("device_map: {a: 1}", ["device_map"]),
    ("torch_compile: true\ncompile: off", ["torch_compile", "compile: off"]),
    ("disable_flash_attn: true\nflash_attn: fa2", ["disable_flash_attn", "flash_attn"]),
    ("attn_implementation: flex", ["attn_implementation", "sdpa"]),
    ("stage: dpo\npref_loss: orpo", ["stage: dpo", "not built yet"]),
    ("stage: kto", ["stage: kto", "not built yet"]),
    ("stage: rm", ["stage: rm", "not built yet"]),
    ("stage: ppo", ["stage: ppo", "not built yet"]),
    ("finetuning_type: oft", ["finetuning_type: oft", "not built"]),
    ("do_predict: true", ["do_predict", "not supported"]),
    ("fp8: true\nquantization_bit: 4", ["fp8", "not supported"]),
    ("streaming: true", ["streaming"]),
    ("logging_strategy: epoch", ["logging_strategy: epoch"]),
    ("report_to: wandb", ["report_to"]),
]  # fmt: skip


@pytest.mark.parametrize(("text", "named"), BROKEN, ids=[text.replace("\n", "; ") for text, _ in BROKEN])
def test_conflicts_name_both_keys_and_a_line(tmp_path: Path, text: str, named: list[str]) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(text + "\n")
    with pytest.raises(ConfigError) as caught:
        load(path)
    for name in named:
        assert name in str(caught.value)
    assert f"{path}:" in caught.value.where


READ_AS = [
    ("finetuning_type: qlora", lambda run: (run.finetuning_type, run.quant.recipe), ("lora", "nf4")),
    ("finetuning_type: qlora\nquant: int4", lambda run: (run.finetuning_type, run.quant.recipe), ("lora", "int4")),
    ("quantization_bit: 4", lambda run: run.quant.recipe, "nf4"),
    ("quantization_bit: '8'\nquantization_method: bitsandbytes", lambda run: run.quant.recipe, "int8-weight-only"),
    ("quantization_bit: 4\ndouble_quantization: false", lambda run: run.quant.weight, "nf4:block64"),
    ("quantization_bit: 4\nquant: {recipe: nf4}", lambda run: run.quant.recipe, "nf4"),
    ("quantization_method: bnb\nquantization_type: nf4\ndouble_quantization: true", lambda r: r.quant.recipe, "bf16"),
    ("quant: int8", lambda run: run.quant.recipe, "int8"),
    ("quant:", lambda run: run.quant.recipe, "bf16"),
    ("use_cpu: true", lambda run: run.device, "cpu"),
    ("no_cuda: true\ndevice: auto", lambda run: run.device, "cpu"),
    ("device_map: auto", lambda run: run.device, "auto"),
    ("device_map: cuda:1", lambda run: run.device, "cuda:1"),
    ("torch_compile: true", lambda run: run.compile, "on"),
    ("torch_compile: false", lambda run: run.compile, "auto"),
    ("disable_flash_attn: true", lambda run: run.flash_attn, "disabled"),
    ("attn_implementation: flash_attention_2", lambda run: run.flash_attn, "fa2"),
    ("attn_implementation: eager", lambda run: run.flash_attn, "disabled"),
    ("activation_checkpointing: true", lambda run: run.gradient_checkpointing, True),
    ("report_to: null", lambda run: run.report_to, ["none"]),
    ("report_to: tensorboard", lambda run: run.report_to, ["tensorboard"]),
    ("eval_dataset: b\neval_strategy: no", lambda run: run.eval_strategy, "no"),
    ("save_strategy: no", lambda run: run.save_strategy, "no"),
    ("early_stopping_patience: 3\neval_strategy: epoch\neval_dataset: b", lambda run: run.early_stopping_steps, 3),
    ("interleave_probs: 0.3, 0.7\ndataset: a,b\nmix_strategy: interleave_under",
     lambda run: run.interleave_probs, [0.3, 0.7]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "read", "expected"), READ_AS, ids=[text.replace("\n", "; ") for text, _, _ in READ_AS]
)
def test_other_shapes_are_read_as_ours(  # type: ignore[no-untyped-def]
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, read, expected: object
) -> None:
    monkeypatch.setattr(recipes, "check_available", lambda policy: None)
    path = tmp_path / "run.yaml"
    path.write_text(text + "\n")
    assert read(load(path).run) == expected


@pytest.mark.parametrize("name", recipes.RECIPES)
def test_a_recipe_loads_exactly_where_this_version_can_run_it(name: str) -> None:
    why = recipes.available()[name]
    if not why:
        assert load(None, [f"quant.recipe={name}"]).run.quant.recipe == name
        return
    with pytest.raises(ConfigError, match="cannot run") as caught:
        load(None, [f"quant.recipe={name}"])
    assert caught.value.where == "command line: quant.recipe" and "recipes that run" in caught.value.fix


def test_an_unknown_recipe_and_a_bad_spec_name_the_line(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("quant:\n  recipe: in8\n")
    with pytest.raises(ConfigError, match="no recipe 'in8'; did you mean 'int8'") as caught:
        load(path)
    assert caught.value.where == f"{path}:2"
    path.write_text("quant:\n  recipe: int8\n  weight: int9:row\n")
    with pytest.raises(ConfigError, match="int9"):
        load(path)
