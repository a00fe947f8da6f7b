"""README.md of an adapter: what it is, what it was made of, how it ended, how to use it."""

from __future__ import annotations

import json
from typing import Any

_TITLES = {"data": "Data", "hyperparameters": "Hyperparameters", "results": "Results", "versions": "Versions"}


def render_card(card: dict[str, Any], settings: Any = None) -> str:
    """Markdown with the YAML header that model hubs read.

    card: any of `title`, `base`, `summary`, `language`, `license` (text), and the tables `data`, `hyperparameters`,
          `results` (losses) and `versions` (dicts of plain values); other keys become tables of their own.
    settings: the PEFT config, for the adapter's own row of facts.
    """
    base = card.get("base") or getattr(settings, "base_model_name_or_path", None) or "unknown"
    header = {"base_model": base, "library_name": "peft" if settings is not None else "transformers"}
    header["pipeline_tag"] = "text-generation"
    tags = ["lumen", "lora"] if settings is not None else ["lumen"]
    lines = ["---", *(f"{key}: {_scalar(value)}" for key, value in header.items())]
    lines += [f"{key}: {_scalar(card[key])}" for key in ("license", "language") if card.get(key)]
    lines += ["tags:", *(f"- {tag}" for tag in tags), "---", "", f"# {card.get('title') or 'Fine-tuned ' + str(base)}"]
    if card.get("summary"):
        lines += ["", str(card["summary"])]
    if settings is not None:
        lines += ["", "## Adapter", *_table(_adapter_facts(settings))]
    for key, value in card.items():
        if isinstance(value, dict) and value:
            lines += ["", f"## {_TITLES.get(key, key.replace('_', ' ').capitalize())}", *_table(value)]
    if settings is not None:
        lines += ["", "## Use", "", "```", f"lumen chat {base} --adapter .", "```"]
    return "\n".join(lines) + "\n"


def _adapter_facts(settings: Any) -> dict[str, Any]:
    facts = {
        "base model": settings.base_model_name_or_path,
        "rank": settings.r,
        "alpha": settings.lora_alpha,
        "dropout": settings.lora_dropout,
        "targets": ", ".join(sorted(settings.target_modules or [])),
    }
    if settings.modules_to_save:
        facts["trained whole"] = ", ".join(settings.modules_to_save)
    variants = [n for n, on in (("rsLoRA", settings.use_rslora), ("DoRA", settings.use_dora)) if on]
    if variants:
        facts["variant"] = ", ".join(variants)
    return facts


def _table(values: dict[str, Any]) -> list[str]:
    rows = [f"| {key} | {_cell(value)} |" for key, value in values.items()]
    return ["", "| | |", "| --- | --- |", *rows]


def _cell(value: Any) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return text.replace("|", "\\|").replace("\n", " ")


def _scalar(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
