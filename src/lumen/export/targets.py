"""What can be written: each format's kind, the engines that load it and the KL that only a broken export exceeds.

The bounds are sanity checks, not promises of quality: a forgotten permutation or a wrong scale gives a KL of several
nats, an honest 8-bit weight a few thousandths.  `export_max_kl` is the user's own bound.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Target:
    """kind: which writer.  label: for people.  max_kl: default bound of the mean KL, nats per token."""

    name: str
    kind: Literal["hf", "adapter", "compressed", "gguf", "onnx"]
    label: str
    max_kl: float


TARGETS = {
    target.name: target
    for target in (
        Target("hf", "hf", "Hugging Face directory", 0.02),
        Target("adapter", "adapter", "PEFT adapter", 0.02),
        Target("fp8", "compressed", "compressed-tensors FP8, dynamic", 0.2),
        Target("fp8-static", "compressed", "compressed-tensors FP8, static", 0.2),
        Target("int8", "compressed", "compressed-tensors INT8 W8A8", 0.2),
        Target("w8a16", "compressed", "compressed-tensors INT8 W8A16", 0.02),
        Target("int4", "compressed", "compressed-tensors INT4 W4A16", 1.0),
        Target("gguf-f16", "gguf", "GGUF F16", 0.02),
        Target("gguf-bf16", "gguf", "GGUF BF16", 0.02),
        Target("gguf-q8_0", "gguf", "GGUF Q8_0", 0.02),
        Target("gguf-q4_0", "gguf", "GGUF Q4_0", 1.0),
        Target("gguf-q4_k", "gguf", "GGUF Q4_K", 1.0),
        Target("gguf-q4_k_m", "gguf", "GGUF Q4_K_M", 1.0),
        Target("gguf-q5_k", "gguf", "GGUF Q5_K", 1.0),
        Target("gguf-q5_k_m", "gguf", "GGUF Q5_K_M", 1.0),
        Target("gguf-q6_k", "gguf", "GGUF Q6_K", 0.2),
        Target("onnx", "onnx", "ONNX", 0.02),
    )
}
"""Name (export_format) → target."""
