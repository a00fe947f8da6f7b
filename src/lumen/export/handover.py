"""Commands that hand an export to an engine."""

from __future__ import annotations

from pathlib import Path


def vllm(directory: Path) -> list[str]:
    """vLLM reads config.json and needs no option for the quantisation."""
    return [f"vllm serve {directory}"]


def section(lines: list[str]) -> str:
    """Markdown for the model card."""
    return "\n".join(["## Serve", "", "```", *lines, "```"]) if lines else ""
