"""Rules between fields: what excludes what, and what needs what.

Each rule names both keys and the choices; they are those of LLaMA-Factory and transformers, and ours for `quant:`.
"""

from __future__ import annotations

from collections.abc import Callable

from lumen.config.schema import FileConfig
from lumen.core import ConfigError, QuantError
from lumen.quant import recipes

Where = Callable[[str], str]

FROZEN_RECIPES = ("nf4", "int4", "int8-weight-only")
"""Recipes that store the base as codes which do not train."""

FROZEN_FORMATS = ("nf4", "int4")
"""Formats that only store; a weight in one does not train."""


def frozen_base(run: FileConfig) -> str:
    """The key and value by which the base is stored as frozen codes; empty where it is not."""
    section = run.quant
    if section.weight is not None and section.weight.partition(":")[0].partition("+")[0] in FROZEN_FORMATS:
        return f"quant.weight: {section.weight}"
    if section.recipe in FROZEN_RECIPES and section.weight != "none":
        return f"quant.recipe: {section.recipe}"
    return ""


def check(run: FileConfig, where: Where = lambda key: key) -> list[str]:
    """Raise ConfigError for the first rule that is broken; returns notes."""

    def refuse(what: str, fix: str, *keys: str) -> ConfigError:
        return ConfigError(what, where=", ".join(dict.fromkeys(where(key) for key in keys)), fix=fix)

    _method(run, refuse)
    _data(run, refuse)
    _evaluation(run, refuse)
    notes = _loop(run, refuse)
    try:
        recipes.check_available(run.quant.policy())
    except QuantError as error:
        raise ConfigError(error.what, where=where("quant.recipe"), fix=error.fix) from None
    return notes


Refuse = Callable[..., ConfigError]


def _method(run: FileConfig, refuse: Refuse) -> None:
    kind = run.finetuning_type
    frozen = frozen_base(run)
    if frozen and kind != "lora":
        raise refuse(
            f"`{frozen}` stores the base as codes that do not train, but `finetuning_type: {kind}` "
            "trains it",
            "use finetuning_type: lora, or a recipe that trains (bf16, int8, fp8, mxfp8)",
            "quant", "finetuning_type",
        )  # fmt: skip
    if run.adapter_name_or_path and kind != "lora":
        raise refuse(
            f"`adapter_name_or_path` needs LoRA, but `finetuning_type: {kind}` is given",
            "use finetuning_type: lora, or merge the adapter first (`lumen merge`)",
            "adapter_name_or_path", "finetuning_type",
        )  # fmt: skip
    if frozen:
        if run.resize_vocab:
            raise refuse(
                f"`resize_vocab` changes the embedding, but `{frozen}` has a frozen base",
                "remove resize_vocab, or use recipe bf16",
                "resize_vocab", "quant",
            )  # fmt: skip
        if run.adapter_name_or_path and run.create_new_adapter:
            raise refuse(
                f"`create_new_adapter` merges into the base, but `{frozen}` stores it as codes",
                "merge first (`lumen merge`), or continue the adapter with create_new_adapter: false",
                "create_new_adapter", "quant",
            )  # fmt: skip
        if run.adapter_name_or_path and len(run.adapter_name_or_path) > 1:
            raise refuse(
                f"`adapter_name_or_path` names several adapters, but `{frozen}` takes one",
                "merge them first (`lumen merge`)",
                "adapter_name_or_path", "quant",
            )  # fmt: skip
        if run.pissa_init:
            raise refuse(
                f"`pissa_init` rewrites the base, but `{frozen}` stores it as codes",
                "remove pissa_init, or use recipe bf16",
                "pissa_init", "quant",
            )  # fmt: skip
    if kind != "lora":
        for key in ("use_rslora", "use_dora", "pissa_init", "loraplus_lr_ratio"):
            if getattr(run, key):
                raise refuse(
                    f"`{key}` is for LoRA, but `finetuning_type: {kind}` is given",
                    f"remove {key}, or use finetuning_type: lora",
                    key, "finetuning_type",
                )  # fmt: skip


def _data(run: FileConfig, refuse: Refuse) -> None:
    held_out = run.val_size > 0
    if held_out and run.eval_dataset:
        raise refuse(
            "`val_size` and `eval_dataset` both say what is held out",
            "keep eval_dataset to evaluate on other rows, or val_size to split `dataset`",
            "val_size", "eval_dataset",
        )  # fmt: skip
    if held_out and not run.dataset:
        raise refuse("`val_size` splits `dataset`, which is not given", "add dataset: NAME", "val_size")
    if run.train_on_prompt and run.mask_history:
        raise refuse(
            "`train_on_prompt` learns every turn and `mask_history` only the last",
            "keep one of them",
            "train_on_prompt", "mask_history",
        )  # fmt: skip
    if run.stage != "sft":
        for key in ("neat_packing", "train_on_prompt", "mask_history"):
            if getattr(run, key):
                raise refuse(f"`{key}` is for stage: sft, but `stage: {run.stage}` is given", f"remove {key}",
                             key, "stage")  # fmt: skip
    if run.neat_packing and run.packing is False:
        raise refuse("`neat_packing: true` packs, but `packing: false` is given", "keep one", "neat_packing", "packing")
    probabilities = run.interleave_probs
    if probabilities is not None:
        if run.mix_strategy == "concat":
            raise refuse(
                "`interleave_probs` needs interleaving, but `mix_strategy: concat` is given",
                "use mix_strategy: interleave_under or interleave_over, or remove interleave_probs",
                "interleave_probs", "mix_strategy",
            )  # fmt: skip
        if min(probabilities, default=-1.0) < 0 or sum(probabilities) <= 0:
            raise refuse("`interleave_probs` must be probabilities", "give one number ≥ 0 per dataset",
                         "interleave_probs")  # fmt: skip
        for key in ("dataset", "eval_dataset"):
            names = getattr(run, key)
            if names and len(names) != len(probabilities):
                raise refuse(
                    f"`interleave_probs` has {len(probabilities)} numbers and `{key}` {len(names)} names",
                    "give one probability for each",
                    "interleave_probs", key,
                )  # fmt: skip


def _evaluation(run: FileConfig, refuse: Refuse) -> None:
    possible = run.val_size > 0 or bool(run.eval_dataset)
    wanting = {
        "eval_strategy": run.eval_strategy != "no",
        "eval_on_start": run.eval_on_start,
        "load_best_model_at_end": run.load_best_model_at_end,
        "early_stopping_steps": run.early_stopping_steps is not None,
    }
    if not possible:
        for key, wanted in wanting.items():
            if wanted:
                raise refuse(
                    f"`{key}` needs held-out rows, but neither `val_size` nor `eval_dataset` is given",
                    "add val_size: 0.1, or eval_dataset: NAME",
                    key,
                )
    for key in ("load_best_model_at_end", "early_stopping_steps"):
        if wanting[key] and run.eval_strategy == "no":
            raise refuse(f"`{key}` needs evaluation while training, but `eval_strategy: no` is given",
                         "add eval_strategy: steps", key, "eval_strategy")  # fmt: skip


def _loop(run: FileConfig, refuse: Refuse) -> list[str]:
    notes: list[str] = []
    for key in ("bf16", "pure_bf16"):
        if run.fp16 and getattr(run, key):
            raise refuse(f"`{key}` and `fp16` exclude each other", "keep one of them", key, "fp16")
    if run.overwrite_output_dir and run.resume_from_checkpoint:
        raise refuse(
            "`overwrite_output_dir` starts afresh and `resume_from_checkpoint` continues",
            "keep one of them",
            "overwrite_output_dir", "resume_from_checkpoint",
        )  # fmt: skip
    if run.save_only_model and run.load_best_model_at_end:
        raise refuse(
            "`load_best_model_at_end` goes back to a checkpoint's state, which `save_only_model` does not write",
            "remove save_only_model (save_total_limit: 1 keeps the disk small)",
            "save_only_model", "load_best_model_at_end",
        )  # fmt: skip
    if run.warmup_ratio > 0 and run.warmup_steps > 0:
        notes.append("`warmup_steps` is used; `warmup_ratio` is overridden by it, as in transformers")
    return notes
