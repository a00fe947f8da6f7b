"""Where and how a model is written out (LLaMA-Factory's names and defaults)."""

from __future__ import annotations

from typing import Literal

from lumen.core import Config, Positive


class ExportConfig(Config):
    """The merged model's directory."""

    export_dir: str | None = None
    """Directory to write. No default: export needs it."""

    export_size: Positive = 5.0
    """Largest safetensors file, in GB (10^9 bytes). Default: 5."""

    export_device: Literal["cpu", "auto"] = "cpu"
    """Where the merge is computed. Default: cpu."""
