"""`export(config)`: the source, a writer, the proof, and only then the name.

    stage (merge in fp32 where there is an adapter) → write → load again → compare → publish by one rename

Everything is written to a temporary directory beside the target.  A comparison above the limit, a full disk or Ctrl-C
leaves the target as it was.
"""

from __future__ import annotations

import importlib.util
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lumen.core import ConfigError, note, say
from lumen.core.files import atomic_directory, atomic_write_json
from lumen.export import handover
from lumen.export.adapter import export_adapter
from lumen.export.calibrate import input_scales
from lumen.export.compressed import SCHEMES, write_compressed
from lumen.export.gguf_run import export_gguf
from lumen.export.merge import check_directory, complete, merge
from lumen.export.onnx import export_onnx
from lumen.export.report import REPORT, ExportResult, empty, sizes, tensor_bytes
from lumen.export.rows import calibration_rows
from lumen.export.stage import stage
from lumen.export.targets import TARGETS, Target
from lumen.export.watch import Watch, finish


def export(config: Any, *, allow_unchanged: bool = False) -> ExportResult:
    """Write `export_dir` in `export_format` and verify it.

    config: a FileConfig, or a MergeConfig.
    Raises ConfigError, ModelError and QuantError; on an error nothing is written.
    """
    begin = time.monotonic()
    target = TARGETS[config.export_format]
    writer = WRITERS[target.kind]
    _refuse_unused(config)
    config = complete(config)
    directory = Path(config.export_dir).expanduser()
    with _scratch(directory) as scratch:
        result = writer(config, target, directory, scratch, allow_unchanged)
    result.seconds = round(time.monotonic() - begin, 2)
    return result


_BELONGS = {
    "export_group_size": ("int4",),
    "export_calibration_data": ("fp8-static",),
    "export_pre_tokenizer": tuple(name for name, target in TARGETS.items() if target.kind == "gguf"),
}
"""Keys that only some formats read."""


def _refuse_unused(config: Any) -> None:
    """Raise ConfigError for a key that the format would ignore."""
    for key, formats in _BELONGS.items():
        if getattr(config, key) is not None and config.export_format not in formats:
            raise ConfigError(
                f"{key} has no meaning for export_format: {config.export_format}",
                where=key,
                fix=f"leave it out; it belongs to {', '.join(formats)}",
            )
    if config.export_format.startswith(("gguf", "onnx")) and config.export_size != type(config)().export_size:
        note(f"export_size changes nothing: {config.export_format} is one file")


@contextmanager
def _scratch(directory: Path) -> Iterator[Path]:
    """A temporary folder on the target's disk."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{directory.name}.", dir=directory.parent) as name:
        yield Path(name)


def _export_hf(config: Any, target: Target, directory: Path, scratch: Path, allow_unchanged: bool) -> ExportResult:
    watch = Watch(config, target, scratch)
    found: list[ExportResult] = []

    def last(folder: Path, merged: Any) -> None:
        result = empty(target, directory, str(config.model_name_or_path), merged.dtype, merged.parameters)
        result.adapters = list(config.adapter_name_or_path or [])
        if merged.report.changes:
            result.details["merge"] = merged.lines()[1]
        result.weights = tensor_bytes(folder)
        watch.compare(folder, result)
        result.license = license_in(folder)
        result.handover = handover.vllm(directory)
        result.files = sizes(folder)
        atomic_write_json(folder / REPORT, result.to_dict())
        found.append(result)

    merge(
        config,
        allow_unchanged=allow_unchanged,
        verify=config.export_verify,
        observe=watch if watch.needed else None,
        finish=last,
    )
    return found[0]


def license_in(folder: Path) -> str | None:
    """The licence that the written card names."""
    for line in (folder / "README.md").read_text(encoding="utf-8").splitlines():
        if line.startswith("license: "):
            return line.removeprefix("license: ").strip('"')
    return None


def _export_compressed(
    config: Any, target: Target, directory: Path, scratch: Path, allow_unchanged: bool
) -> ExportResult:
    _need_compressed_tensors(config)
    check_directory(config, directory)
    watch = Watch(config, target, scratch)
    scales: dict[str, float] = {}
    if SCHEMES[target.name].static:
        watch.then.append(lambda loaded: scales.update(_calibrate(config, loaded)))
    source = scratch / "source"
    source.mkdir()
    staged = stage(config, source, allow_unchanged=allow_unchanged, observe=watch if watch.needed else None)
    if target.name == "int8" and config.export_verify and any(".experts." in name for name in staged.weights.files):
        raise ConfigError(
            "transformers cannot load INT8 W8A8 experts, so this export cannot be verified",
            where="export_format",
            fix="export fp8, w8a16 or int4; or export_verify: false, for vLLM alone",
        )
    with atomic_directory(directory) as folder:
        written = write_compressed(
            staged,
            folder,
            target.name,
            group_size=config.export_group_size,
            max_shard=config.export_size * 1e9,
            input_scales=scales,
            allow_remote_code=config.allow_remote_code,
        )
        staged.tokenizer.save_pretrained(folder)
        generation = staged.folder / "generation_config.json"
        if generation.is_file():
            (folder / generation.name).write_bytes(generation.read_bytes())
        result = empty(target, directory, staged.source, staged.dtype, staged.weights.parameters)
        result.adapters, result.weights = staged.adapters, written.bytes
        result.quantised, result.kept = len(written.quantised), written.kept
        if written.group_size:
            result.details["group size"] = written.group_size
        watch.compare(folder, result)
        result.handover = handover.vllm(directory)
        finish(folder, result, staged)
    return result


def _calibrate(config: Any, loaded: Any) -> dict[str, float]:
    rows = calibration_rows(config, loaded.tokenizer)
    say(f"calibration on {rows.tokens:,} tokens of {rows.name}")
    return input_scales(_bare(loaded.model), rows)


def _bare(model: Any) -> Any:
    """The model without what PEFT wraps around it; the adapter stays active inside."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _need_compressed_tensors(config: Any) -> None:
    if config.export_verify and importlib.util.find_spec("compressed_tensors") is None:
        raise ConfigError(
            "loading a compressed-tensors export again needs the package compressed-tensors",
            where="export_format",
            fix="pip install 'lumen-train[export]', or export without the check (export_verify: false)",
        )


WRITERS: dict[str, Callable[[Any, Target, Path, Path, bool], ExportResult]] = {
    "hf": _export_hf, "adapter": export_adapter, "compressed": _export_compressed, "gguf": export_gguf,
    "onnx": export_onnx,
}  # fmt: skip
"""Kind of a target → its writer: (config, target, directory, scratch folder, allow_unchanged) → result."""
