"""K-quants through `libgguf`, which carries ggml's own quantisers (extra `kquants`).

Super-blocks of 256 values hold 6-bit scales and minima of blocks of 16 or 32.  `_K` takes one type everywhere, `_K_M`
gives the value and down projections of some layers the next larger one, by llama.cpp's rule: the first and last eighth
of the layers and every third between.  Embedding and output are Q6_K in all of them.  Rows that are no multiple of 256
fall back to Q8_0.
"""

from __future__ import annotations

import importlib.util
import re

from lumen.core import ConfigError

K_QUANTS = {"q4_k": "q4_k", "q4_k_m": "q4_k", "q5_k": "q5_k", "q5_k_m": "q5_k", "q6_k": "q6_k"}
"""Name of the mixture → type of most matrices."""


def require_libgguf() -> None:
    """Raise ConfigError where the extra is missing."""
    if importlib.util.find_spec("libgguf") is None:
        raise ConfigError(
            "K-quants are made by the package libgguf, which is not installed",
            where="export_format",
            fix="pip install 'lumen-train[kquants]', or export gguf-q8_0 or gguf-q4_0",
        )


def k_type(name: str, kind: str, layers: int) -> str:
    """The ggml type of a matrix in the mixture `kind` of a model with so many layers."""
    if name in ("token_embd.weight", "output.weight"):
        return "q6_k"
    match = re.fullmatch(r"blk\.(\d+)\.(attn_v|ffn_down|ffn_down_exps)\.weight", name)
    if kind.endswith("_m") and match and _more_bits(int(match[1]), layers):
        return "q6_k"
    return K_QUANTS[kind]


def _more_bits(layer: int, layers: int) -> bool:
    eighth = layers // 8
    return layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2
