"""What an export wrote, how large it is and how it compares: for the terminal, and as JSON beside the files."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from lumen.export.targets import Target
from lumen.export.verify import Verification

REPORT = "export.json"


@dataclass
class ExportResult:
    """One export.

    files:      name → bytes, everything in the directory but this report.
    weights:    bytes of the weight files' tensors.  parameters: values in the source's tensors.
    quantised:  layers in the low-precision format.  kept: linear layers that stay in `dtype`.
    handover:   commands that serve the export.
    details:    facts of the format (group size, file type …).
    """

    format: str
    label: str
    directory: str
    source: str
    dtype: str
    parameters: int
    weights: int
    adapters: list[str] = field(default_factory=list)
    quantised: int = 0
    kept: list[str] = field(default_factory=list)
    license: str | None = None
    details: dict[str, Any] = field(default_factory=dict)
    handover: list[str] = field(default_factory=list)
    files: dict[str, int] = field(default_factory=dict)
    verification: Verification | None = None
    seconds: float = 0.0

    @property
    def bits_per_weight(self) -> float:
        """Stored bits of a parameter, scales and kept tensors included."""
        return 8 * self.weights / max(1, self.parameters)

    @property
    def bytes(self) -> int:
        """Of all files."""
        return sum(self.files.values())

    def to_dict(self) -> dict[str, Any]:
        """JSON values."""
        return asdict(self) | {"bytes": self.bytes, "bits_per_weight": round(self.bits_per_weight, 4)}

    def lines(self) -> list[str]:
        """A summary for the terminal."""
        size = f"{self.bytes / 1e6:.1f} MB, {self.bits_per_weight:.2f} bits per weight"
        lines = [f"{self.directory}: {self.label}, {self.parameters:,} parameters, {size}"]
        if self.quantised:
            kept = f"; kept in {self.dtype}: embeddings, norms"
            lines.append(f"{self.quantised} layers quantised{kept}{', ' + _few(self.kept) if self.kept else ''}")
        lines += [f"{key}: {value}" for key, value in self.details.items()]
        lines.append(f"licence: {self.license or 'not named by the base; check it'}")
        if self.verification is None:
            lines.append("not verified (export_verify: false)")
        else:
            lines.append(f"verified: {self.verification.line()}")
        return lines

    def table(self) -> dict[str, Any]:
        """Facts for the model card."""
        facts: dict[str, Any] = {
            "format": self.label,
            "base model": self.source,
            "parameters": f"{self.parameters:,}",
            "bits per weight": f"{self.bits_per_weight:.2f}",
        }
        if self.adapters:
            facts["adapters merged"] = ", ".join(self.adapters)
        if (found := self.verification) is not None:
            facts |= {
                "mean KL to the source": f"{found.kl:.2e} nats a token",
                "perplexity": f"{found.perplexity:.4g} (source {found.perplexity_source:.4g})",
                "compared on": f"{found.tokens:,} tokens of {found.rows}",
            }
        return facts


def _few(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def sizes(folder: Path) -> dict[str, int]:
    """Name → bytes of every file below a folder."""
    return {
        str(path.relative_to(folder)): path.stat().st_size
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != REPORT
    }


def tensor_bytes(folder: Path) -> int:
    """Bytes of the tensors in a folder's safetensors files."""
    from lumen.export.stage import Weights

    weights = Weights.open(folder)
    width = {"F32": 4, "F16": 2, "BF16": 2, "F64": 8, "I64": 8, "I32": 4, "I8": 1, "U8": 1, "F8_E4M3": 1, "F8_E5M2": 1}
    return sum(torch.Size(shape).numel() * width[weights.dtypes[name]] for name, shape in weights.shapes.items())


def empty(target: Target, directory: Path, source: str, dtype: torch.dtype | str, parameters: int) -> ExportResult:
    """A result to fill in."""
    name = str(dtype).removeprefix("torch.")
    return ExportResult(target.name, target.label, str(directory), source, name, parameters, 0)
