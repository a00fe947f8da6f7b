"""The source of an export as a folder of safetensors that is read tensor by tensor.

A writer needs names, shapes and one tensor at a time, never a whole model.  A plain directory without an adapter is
read where it lies.  Everything else (an adapter to merge, a GGUF file, a hub id, added tokens) is first merged and
written to a folder of its own: in fp32 where an adapter is merged or a GGUF file is unpacked, so that quantising starts
from the exact sum and rounds once.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from lumen.core import ModelError
from lumen.data.templates import apply_template
from lumen.export.card import licence_of
from lumen.export.merge import merge_adapters, write_directory
from lumen.models.config import ModelConfig
from lumen.models.load import LoadedModel, inference_dtype, load_model
from lumen.models.source import raw_config, resolve_source
from lumen.models.tokenizer import load_tokenizer

INDEX = "model.safetensors.index.json"


@dataclass
class Weights:
    """The tensors of a Hugging Face directory by their names on the disk.

    files: name → the file that holds it.  shapes, dtypes: name → shape, safetensors' dtype name.
    """

    folder: Path
    files: dict[str, Path] = field(default_factory=dict)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    dtypes: dict[str, str] = field(default_factory=dict)

    @classmethod
    def open(cls, folder: Path) -> Weights:
        """Read headers only.  Raises ModelError where a file is missing or damaged."""
        weights = cls(folder)
        index = folder / INDEX
        if index.is_file():
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
            paths = [folder / name for name in names]
        else:
            paths = sorted(folder.glob("*.safetensors"))
        for path in paths:
            try:
                with safe_open(path, framework="pt") as file:
                    for name in file.keys():  # noqa: SIM118
                        part = file.get_slice(name)
                        weights.files[name] = path
                        weights.shapes[name] = tuple(part.get_shape())
                        weights.dtypes[name] = part.get_dtype()
            except Exception as error:
                raise ModelError(f"{path} cannot be read: {error}", where=str(folder), fix="copy it again") from error
        if not weights.files:
            raise ModelError(f"{folder} holds no safetensors", where=str(folder))
        return weights

    def names(self) -> list[str]:
        """Every tensor in the order of the files, layers in numerical order."""
        return sorted(self.files, key=_natural)

    def get(self, name: str) -> torch.Tensor:
        """One tensor, on the CPU, in its own dtype."""
        with safe_open(self.files[name], framework="pt") as file:
            return file.get_tensor(name)

    @property
    def parameters(self) -> int:
        """Values in all tensors."""
        return sum(torch.Size(shape).numel() for shape in self.shapes.values())


def _natural(name: str) -> list[Any]:
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in name.split(".")]


@dataclass
class Staged:
    """What a writer gets.

    folder:    Hugging Face directory with config.json and safetensors (a temporary one, or the source itself).
    weights:   its tensors.
    config:    config.json as a dict.
    tokenizer: with the chat template that the run uses.
    dtype:     dtype of what is not quantised.
    source:    what the model is called: the base's name or path.
    adapters:  merged adapters.
    facts:     rows of the model card.
    """

    folder: Path
    weights: Weights
    config: dict[str, Any]
    tokenizer: Any
    dtype: torch.dtype
    source: str
    adapters: list[str] = field(default_factory=list)
    license: str | None = None
    licence_files: list[Path] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """A short name for files: the last part of the source's name, without what a file name cannot hold."""
        last = self.adapters[-1] if self.adapters else self.source
        plain = "".join(c if c.isalnum() or c in "-._" else "-" for c in Path(last).name.removesuffix(".gguf"))
        return plain.strip("-._") or "model"


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """The language model's part of config.json."""
    return config.get("text_config") or config


_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def stage(
    config: Any, folder: Path, *, allow_unchanged: bool = False, observe: Callable[[Any], None] | None = None
) -> Staged:
    """Make the configuration's model readable tensor by tensor.

    folder:  an empty folder for what has to be written first; unused where the source is read where it lies.
    observe: sees the adapted model (a LoadedModel; in fp32 unless `infer_dtype` is set) before it is merged.
    Raises ModelError for a source that is quantised already, ConfigError and ModelError as loading and merging do.
    """
    source = resolve_source(config)
    raw = raw_config(source, config)
    _check_plain(raw, str(source))
    licence, files = licence_of(config)
    names = list(config.adapter_name_or_path or [])
    common: dict[str, Any] = {"source": str(config.model_name_or_path), "license": licence, "licence_files": files}
    plain = not names and not config.add_tokens and not config.add_special_tokens and not config.resize_vocab
    root = Path(source.path)
    if source.kind == "directory" and plain and "text_config" not in raw and list(root.glob("*.safetensors")):
        weights = Weights.open(root)
        tokenizer = load_tokenizer(source, config)
        apply_template(tokenizer, config.template)
        if observe is not None:
            loaded = load_model(config, dtype=inference_dtype(config) or torch.float32, device=config.export_device)
            loaded.tokenizer = tokenizer
            observe(loaded)
            del loaded
        dtype = inference_dtype(config) or _most(weights)
        return Staged(root, weights, raw, tokenizer, dtype, **common)
    return _merged(config, folder, names, allow_unchanged, observe, common)


def _merged(
    config: Any,
    folder: Path,
    names: list[str],
    allow_unchanged: bool,
    observe: Callable[[Any], None] | None,
    common: dict[str, Any],
) -> Staged:
    wanted = inference_dtype(config)
    unpacked = bool(resolve_source(config).gguf_file)
    # A GGUF file's values are more exact than bf16; its own dtype is then only that of what is not quantised.
    loaded = load_model(
        config, dtype=torch.float32 if unpacked and wanted is None else wanted, device=config.export_device
    )
    dtype = wanted or (torch.bfloat16 if unpacked else loaded.dtype)
    loaded.model.float()
    loaded.dtype = torch.float32

    def look(stage: str, now: LoadedModel) -> None:
        if stage == "adapted" and observe is not None:
            observe(now)

    report = merge_adapters(loaded, config, allow_unchanged=allow_unchanged, look=look)
    write_directory(loaded, folder, config, names, report)
    tokenizer = loaded.tokenizer
    loaded.model = None
    raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    changes = report.changes.values()
    facts = {"adapters": ", ".join(names), "targets merged": str(len(changes))} if names else {}
    return Staged(folder, Weights.open(folder), raw, tokenizer, dtype, adapters=names, facts=facts, **common)


def _most(weights: Weights) -> torch.dtype:
    """The dtype that holds most of the values."""
    counts: dict[str, int] = {}
    for name, dtype in weights.dtypes.items():
        counts[dtype] = counts.get(dtype, 0) + torch.Size(weights.shapes[name]).numel()
    return _DTYPES.get(max(counts, key=lambda dtype: counts[dtype]), torch.bfloat16)


def _check_plain(raw: dict[str, Any], where: str) -> None:
    method = (raw.get("quantization_config") or {}).get("quant_method")
    if method:
        raise ModelError(
            f"{where} is quantised already ({method})",
            where="model_name_or_path",
            fix="export from the model in full precision: quantising twice adds both errors",
        )


def reload_config(folder: Path | str) -> ModelConfig:
    """The configuration that loads an export again: only the folder, nothing added."""
    return ModelConfig(model_name_or_path=str(folder))
