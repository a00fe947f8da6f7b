"""`export_format: gguf-NAME`: a GGUF file, a Modelfile, a card and the proof in one directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lumen.core import ConfigError
from lumen.core.files import atomic_directory
from lumen.export import handover
from lumen.export.gguf_model import architecture
from lumen.export.gguf_vocab import vocabulary
from lumen.export.gguf_write import write_gguf
from lumen.export.merge import check_directory
from lumen.export.ollama import write_modelfile
from lumen.export.report import ExportResult, empty
from lumen.export.stage import stage
from lumen.export.targets import Target
from lumen.export.watch import Watch, finish

UNVERIFIED = ("mixtral",)
"""Architectures whose GGUF files transformers does not load again."""


def export_gguf(config: Any, target: Target, directory: Path, scratch: Path, allow_unchanged: bool) -> ExportResult:
    """Write `NAME-KIND.gguf` and what belongs beside it into `directory`."""
    from transformers import AutoConfig

    check_directory(config, directory, holds="*.gguf")
    kind = target.name.removeprefix("gguf-")
    watch = Watch(config, target, scratch)
    source = scratch / "source"
    source.mkdir()
    staged = stage(config, source, allow_unchanged=allow_unchanged, observe=watch if watch.needed else None)
    settings = AutoConfig.from_pretrained(staged.folder, local_files_only=True)
    architecture(settings)
    if settings.model_type in UNVERIFIED and config.export_verify:
        raise ConfigError(
            f"transformers does not load GGUF files of {settings.model_type}, so this export cannot be verified",
            where="export_format",
            fix="export_verify: false writes it, for llama.cpp alone",
        )
    rows = staged.weights.shapes["model.embed_tokens.weight"][0]
    words = vocabulary(
        staged.tokenizer,
        rows,
        end_ids=_end_ids(staged.folder, settings, staged.tokenizer),
        pre=config.export_pre_tokenizer,
    )
    with atomic_directory(directory) as folder:
        path = folder / f"{staged.name}-{kind.upper()}.gguf"
        written = write_gguf(staged, settings, words, path, kind)
        result = empty(target, directory, staged.source, "float32", written.parameters)
        result.adapters, result.weights = staged.adapters, written.bytes
        result.details = {
            "tensors": ", ".join(f"{count} {type_}" for type_, count in written.types.items()),
            "pre-tokenizer": words.pre,
        }
        if written.fallbacks:
            result.details["rows that are no multiple of a block"] = len(written.fallbacks)
        form = write_modelfile(folder, path.name, staged.tokenizer, staged.license)
        has_template = staged.tokenizer.chat_template is not None
        result.details["Ollama's template"] = form or ("not expressible" if has_template else "none: no chat template")
        watch.compare(path, result, settings=settings)
        result.handover = handover.llama_cpp(directory, path.name)
        finish(folder, result, staged)
    return result


def _end_ids(folder: Path, settings: Any, tokenizer: Any) -> set[int]:
    """Every id at which generation stops: the tokenizer's, the model's and its generation config's."""
    values = [tokenizer.eos_token_id, settings.eos_token_id]
    path = folder / "generation_config.json"
    if path.is_file():
        values.append(json.loads(path.read_text(encoding="utf-8")).get("eos_token_id"))
    ids: set[int] = set()
    for value in values:
        ids |= set(value) if isinstance(value, list) else ({value} if value is not None else set())
    return ids
