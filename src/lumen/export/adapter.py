"""`export_format: adapter`: a PEFT adapter as vLLM takes it, checked before anything is copied.

vLLM serves adapters beside one base and refuses, when it loads one, what its kernels do not have: DoRA, biases, modules
trained whole (but `classifier` and `score`), starts that changed the base (PiSSA, OLoRA, CorDA, LoftQ …), replicated
layers, and ranks above 512.  Here each is an error with its reason and the way out, which mostly is a merge.  The
largest rank decides `--max-lora-rank`, one of a fixed list.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from lumen.adapters.load import adapter_base, find_adapter, load_adapter
from lumen.adapters.save import CONFIG, WEIGHTS
from lumen.core import ConfigError, ModelError
from lumen.core.files import atomic_directory
from lumen.export import handover
from lumen.export.card import licence_of
from lumen.export.merge import check_directory
from lumen.export.report import ExportResult, empty, tensor_bytes
from lumen.export.stage import Staged, Weights
from lumen.export.targets import Target
from lumen.export.watch import Watch, finish
from lumen.models.load import inference_dtype, load_model, quiet_progress

MAX_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values of vLLM's --max-lora-rank (0.32)."""

_WHOLE = {"classifier", "score"}
_PLAIN_STARTS = (True, False, None, "gaussian", "orthogonal", "eva", "default")


def check_for_vllm(path: Path) -> int:
    """Raise ModelError for an adapter that vLLM refuses; returns the --max-lora-rank to serve it with."""
    try:
        settings: dict[str, Any] = json.loads((path / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(
            f"{path / CONFIG} is damaged: {error}", where=str(path), fix="copy the adapter again"
        ) from error
    kind = str(settings.get("peft_type", "LORA"))
    merge = "merge it instead: export_format: hf, or a quantised format"
    whole = sorted(set(settings.get("modules_to_save") or []) - _WHOLE)
    problems = [
        (kind.upper() != "LORA", f"it is {kind}, not LoRA", merge),
        (bool(settings.get("use_dora")), "it is a DoRA adapter", merge),
        (settings.get("bias", "none") != "none" or bool(settings.get("lora_bias")), "it has biases", merge),
        (bool(whole), f"it holds modules trained whole ({', '.join(whole)})", merge),
        (bool(settings.get("layer_replication")), "it replicates layers", "apply the replication to the base"),
        (bool(settings.get("trainable_token_indices")), "it trains single tokens", merge),
        (bool(settings.get("target_parameters")), "it adapts parameters without a module of their own", merge),
        (
            not _plain_start(settings.get("init_lora_weights")),
            f"its start values belong to a changed base (init_lora_weights: {settings.get('init_lora_weights')})",
            "Lumen's own training writes PiSSA and OLoRA as plain LoRA; convert it with PEFT, or " + merge,
        ),
    ]  # fmt: skip
    for wrong, what, fix in problems:
        if wrong:
            raise ModelError(f"vLLM does not load this adapter: {what}", where=str(path / CONFIG), fix=fix)
    rank = max([int(settings.get("r", 0)), *map(int, (settings.get("rank_pattern") or {}).values())])
    if rank > MAX_RANKS[-1] or rank < 1:
        raise ModelError(
            f"vLLM does not load this adapter: rank {rank}, at most {MAX_RANKS[-1]}",
            where=str(path / CONFIG),
            fix=merge,
        )
    _check_tensors(path, merge)
    return next(limit for limit in MAX_RANKS if limit >= rank)


def _plain_start(value: Any) -> bool:
    return value in _PLAIN_STARTS


def _check_tensors(path: Path, merge: str) -> None:
    """Only A and B matrices, finite, under the names that vLLM expects."""
    with safe_open(path / WEIGHTS, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118
            if not re.fullmatch(r"base_model\.model\..+\.lora_(A|B|embedding_A|embedding_B)(\.weight)?", name):
                raise ModelError(
                    f"vLLM does not load this adapter: the tensor {name} is no LoRA matrix", where=WEIGHTS, fix=merge
                )
            if not bool(torch.isfinite(file.get_tensor(name)).all()):
                raise ModelError(f"{name} has values that are not finite", where=WEIGHTS, fix="the adapter is damaged")


def export_adapter(config: Any, target: Target, directory: Path, scratch: Path, allow_unchanged: bool) -> ExportResult:
    """Copy the adapter's files, tokenizer and card into `directory`, and compare the copy with the original.

    Raises ConfigError without exactly one adapter, ModelError for one that vLLM refuses.
    """
    names = list(config.adapter_name_or_path or [])
    if len(names) != 1:
        raise ConfigError(
            f"export_format: adapter needs one adapter, not {len(names)}",
            where="adapter_name_or_path",
            fix="--adapter DIR; several are merged by export_format: hf",
        )
    check_directory(config, directory, holds=CONFIG)
    path = find_adapter(names[0], config)
    limit = check_for_vllm(path)
    base = str(config.model_name_or_path or adapter_base(path))
    watch = Watch(config, target, scratch)
    loaded = load_model(config, dtype=inference_dtype(config), device=config.export_device)
    dtype = loaded.dtype
    if watch.needed:
        load_adapter(loaded, names[0], config=config)
        watch(loaded)
    licence, files = licence_of(config)
    tokenizer = loaded.tokenizer
    del loaded
    with atomic_directory(directory) as folder:
        for name in (CONFIG, WEIGHTS):
            shutil.copyfile(path / name, folder / name)
        tokenizer.save_pretrained(folder)
        weights = Weights.open(folder)
        staged = Staged(path, weights, {}, tokenizer, dtype, base, [Path(names[0]).name], licence, files)
        result = empty(target, directory, base, dtype, weights.parameters)
        result.weights = tensor_bytes(folder)
        result.details = {"vLLM": f"serve it with --max-lora-rank {limit}"}
        if watch.reference is not None:
            result.verification = _verified(config, base, folder, watch)
        result.handover = handover.vllm_adapter(base, directory, staged.name, limit)
        finish(folder, result, staged)
    return result


def _verified(config: Any, base: str, folder: Path, watch: Watch) -> Any:
    """The copy on a fresh base, by PEFT alone."""
    from peft import PeftModel

    assert watch.reference is not None
    with quiet_progress():
        again = load_model(config, dtype=getattr(torch, watch.reference.dtype), device=config.export_device)
        model = PeftModel.from_pretrained(again.model, str(folder))
        found = watch.reference.compare(model, watch.limit)
    found.check()
    return found
