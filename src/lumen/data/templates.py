"""Named chat templates.

`template: NAME` sets the tokenizer's chat template, so training, chat, serving and export read the same text.  The
templates are jinja files in `chat_templates/`, written for Lumen after the published formats of the models.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from lumen.core import ConfigError, note

FOLDER = Path(__file__).parent / "chat_templates"


@dataclass(frozen=True)
class NamedTemplate:
    """file: its jinja file without suffix. stop: tokens that end the assistant's turn ("" the tokenizer's own)."""

    file: str
    stop: tuple[str, ...] = ()


TEMPLATES: dict[str, NamedTemplate] = {
    "chatml": NamedTemplate("chatml", ("<|im_end|>",)),
}


@cache
def template_text(name: str) -> str:
    """The jinja text of a named template.  Raises ConfigError with the nearest name where it is unknown."""
    if name not in TEMPLATES:
        near = difflib.get_close_matches(name, TEMPLATES, 1, cutoff=0.5)
        known = ", ".join(sorted(TEMPLATES))
        fix = f"did you mean {near[0]!r}? known: {known}" if near else f"known: {known}"
        raise ConfigError(f"template {name!r} is unknown", where="template", fix=fix + "; or leave it out")
    return (FOLDER / f"{TEMPLATES[name].file}.jinja").read_text("utf-8").rstrip("\n")


def apply_template(tokenizer: Any, name: str | None) -> Any:
    """Set the tokenizer's chat template by name (None leaves its own) and return the tokenizer.

    A tokenizer that puts its begin token before every text gets a template that writes it, so there is exactly one.
    Notes once where the template's end token is not a single token of this tokenizer.
    """
    if name is None:
        return tokenizer
    text = template_text(name)
    if _adds_bos(tokenizer) and "bos_token" not in text:
        text = "{{- bos_token -}}" + text
    tokenizer.chat_template = text
    for stop in TEMPLATES[name].stop:
        if tokenizer.convert_tokens_to_ids(stop) in (None, tokenizer.unk_token_id):
            note(f"template {name} ends turns with {stop}, which is not a token of this tokenizer: it is split")
    return tokenizer


def _adds_bos(tokenizer: Any) -> bool:
    bos = getattr(tokenizer, "bos_token_id", None)
    return bos is not None and list(tokenizer("a")["input_ids"])[:1] == [bos]
