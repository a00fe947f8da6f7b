"""Commands that hand an export to an engine."""

from __future__ import annotations

from pathlib import Path


def vllm(directory: Path) -> list[str]:
    """vLLM reads config.json and needs no option for the quantisation."""
    return [f"vllm serve {directory}"]


def vllm_adapter(base: str, directory: Path, name: str, max_rank: int) -> list[str]:
    """vLLM with the adapter beside its base."""
    return [f"vllm serve {base} --enable-lora --max-lora-rank {max_rank} --lora-modules {name}={directory}"]


def llama_cpp(directory: Path, file: str) -> list[str]:
    """llama.cpp's server and command line; Ollama through the Modelfile."""
    name = file.removesuffix(".gguf").lower()
    return [
        f"llama-server -m {directory / file} --jinja",
        f"llama-cli -m {directory / file} --jinja",
        f"ollama create {name} -f {directory / 'Modelfile'} && ollama run {name}",
    ]


def section(lines: list[str]) -> str:
    """Markdown for the model card."""
    return "\n".join(["## Serve", "", "```", *lines, "```"]) if lines else ""
