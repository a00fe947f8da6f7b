"""What every writer shares: remembering how the source answers, comparing the export, and finishing its folder."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from lumen.core import say
from lumen.core.files import atomic_write_json
from lumen.export import handover
from lumen.export.card import write_card
from lumen.export.report import REPORT, ExportResult, sizes
from lumen.export.rows import verification_rows
from lumen.export.stage import Staged, reload_config
from lumen.export.targets import Target
from lumen.export.verify import Reference
from lumen.models.device import choose_device
from lumen.models.gguf import quick_gguf
from lumen.models.load import load_model, quiet_progress


class Watch:
    """Remembers how the source answers, when it is in memory for a moment."""

    def __init__(self, config: Any, target: Target, scratch: Path) -> None:
        self.config = config
        self.target = target
        self.limit = target.max_kl if config.export_max_kl is None else config.export_max_kl
        self.scratch = scratch
        self.reference: Reference | None = None
        self.then: list[Callable[[Any], None]] = []

    def __call__(self, loaded: Any) -> None:
        if self.config.export_verify:
            rows = verification_rows(self.config, loaded.tokenizer)
            say(f"the source on {rows.tokens:,} tokens of {rows.name}")
            folder = self.scratch / "reference"
            folder.mkdir()
            self.reference = Reference(loaded.model, rows, folder)
        for action in self.then:
            action(loaded)

    @property
    def needed(self) -> bool:
        """Whether the source must be loaded at all."""
        return self.config.export_verify or bool(self.then)

    def compare(self, path: Path, result: ExportResult, *, settings: Any = None) -> None:
        """Load what was written and compare; raises ModelError above the limit.

        settings: of the source, for a GGUF file: transformers reads rope scaling and the like from no such file.
        """
        if self.reference is None:
            return
        dtype = getattr(torch, self.reference.dtype)
        say(f"the export, loaded again from {path.name if path.is_file() else 'its directory'}")
        with quiet_progress():
            again = self._again(path, dtype, settings)
            result.verification = self.reference.compare(again, self.limit)
        result.verification.check()

    def _again(self, path: Path, dtype: torch.dtype, settings: Any) -> Any:
        """The written model, by transformers alone and not by a reader of ours."""
        if self.target.kind == "hf":
            return load_model(reload_config(path), dtype=dtype, device=self.config.export_device).model
        import transformers

        device = choose_device(self.config.export_device)
        arguments: dict[str, Any] = {"dtype": dtype, "device_map": {"": device}}
        if path.is_file():
            if settings.model_type == "mistral":  # in GGUF it is a llama
                settings = transformers.LlamaConfig.from_dict({**settings.to_dict(), "model_type": "llama"})
            arguments |= {"gguf_file": path.name, "config": settings}
            arguments["quantization_config"] = transformers.GgufConfig(dequantize=True)
            path = path.parent
        verbosity = transformers.logging.get_verbosity()
        transformers.logging.set_verbosity_error()
        try:
            with quick_gguf() if "gguf_file" in arguments else nullcontext():
                return transformers.AutoModelForCausalLM.from_pretrained(path, **arguments)
        finally:
            transformers.logging.set_verbosity(verbosity)


def finish(folder: Path, result: ExportResult, staged: Staged, *, base: str = "") -> None:
    """Card, sizes and the JSON report into the folder that is about to be published."""
    result.license = staged.license
    write_card(
        folder,
        title=f"{staged.name}, {result.label}",
        base=base or staged.source,
        license_name=staged.license,
        licence_files=staged.licence_files,
        tables={"export": result.table() | staged.facts},
        text=handover.section(result.handover),
    )
    result.files = sizes(folder)
    atomic_write_json(folder / REPORT, result.to_dict())
