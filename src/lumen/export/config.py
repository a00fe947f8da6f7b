"""Where and how a model is written out (LLaMA-Factory's names and defaults, and Lumen's own)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

from lumen.core import Config, Count, NonNegative, Positive

_ALIASES = {
    "merged": "hf", "peft": "adapter", "lora": "adapter", "fp8-dynamic": "fp8", "w8a8": "int8", "w4a16": "int4",
    "gguf": "gguf-q8_0",
}  # fmt: skip


def _format_name(value: Any) -> Any:
    """Other names of a format: `W4A16`, `q8_0`, `GGUF`."""
    if not isinstance(value, str):
        return value
    name = value.strip().lower().replace("fp8_", "fp8-").replace("gguf_", "gguf-").replace(":", "-")
    name = _ALIASES.get(name, name)
    return f"gguf-{name}" if name in ("f16", "bf16") or name[:1] == "q" else name


class ExportConfig(Config):
    """The written model: its directory, its format, and the proof that it answers like its source."""

    export_dir: str | None = None
    """Directory to write. No default: export needs it."""

    export_size: Positive = 5.0
    """Largest safetensors file, in GB (10^9 bytes). Default: 5."""

    export_device: Literal["cpu", "auto"] = "cpu"
    """Where the merge is computed. Default: cpu."""

    export_format: Annotated[
        Literal[
            "hf", "adapter", "fp8", "fp8-static", "int8", "w8a16", "int4", "gguf-f16", "gguf-bf16", "gguf-q8_0",
            "gguf-q4_0", "gguf-q4_k", "gguf-q4_k_m", "gguf-q5_k", "gguf-q5_k_m", "gguf-q6_k", "onnx",
        ],
        BeforeValidator(_format_name),
    ] = "hf"  # fmt: skip
    """What to write: hf (merged Hugging Face directory), adapter (PEFT, checked for vLLM), compressed-tensors (fp8,
    fp8-static, int8 = W8A8, w8a16, int4 = W4A16), gguf-NAME, onnx. Default: hf."""

    export_group_size: Literal[16, 32, 64, 128, 256] | None = None
    """int4: values that share a scale. Default: null, the largest of 128, 64 and 32 that divides every layer's rows."""

    export_pre_tokenizer: str | None = None
    """gguf: llama.cpp's name of the pre-tokenizer, for a tokenizer that its table does not know. Default: null, looked
    up."""

    export_verify: bool = True
    """Load what was written and compare it with its source on held-out rows. Default: true."""

    export_verify_data: str | None = None
    """Held-out rows of the comparison: a text file, or rows in any form that training reads. Default: null, the run's
    held-out set where there is one, else a text that comes with Lumen."""

    export_verify_tokens: Count = 4096
    """Tokens that are compared, at most. Default: 4096."""

    export_max_kl: NonNegative | None = None
    """Largest mean KL divergence to the source, nats a token; above it nothing is written. Default: null, a bound of
    the format that only a broken export passes (docs/export.md)."""

    export_calibration_data: str | None = None
    """fp8-static: rows on which the activations' ranges are taken, in the forms of export_verify_data. Default: null,
    the training rows where they are named, else the text that comes with Lumen."""

    export_calibration_tokens: Count = 8192
    """fp8-static: tokens of calibration, at most. Default: 8192."""
