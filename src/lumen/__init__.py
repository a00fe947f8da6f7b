"""Lumen: train and fine-tune large language models in low precision, AMD first.

The public surface is small and lazy; importing it starts no GPU and loads no heavy package:

    report = lumen.quantize(model, "int8")      # in place, works in any training loop
    lumen.dequantize(model)                     # restores the module tree and the state_dict keys
    result = lumen.train("run.yaml", learning_rate=2e-4)
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_PUBLIC = {
    "quantize": "lumen.quant.api",
    "dequantize": "lumen.quant.api",
    "train": "lumen.cli.api",
}

__all__ = ["__version__", "dequantize", "quantize", "train"]


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module 'lumen' has no attribute {name!r}")
