"""Named chat templates, and how a turn ends.

`template: NAME` sets the tokenizer's chat template, so training, chat, serving and export read the same text and save
it with the model.  The templates are jinja files in `chat_templates/`, written for Lumen after the formats that the
models' makers publish; names are LLaMA-Factory's where it has one, so its files find what they ask for.

A template writes the begin token only where the model's own format does.  For a tokenizer that puts its begin token
before every text, `apply_template` lets any template write it: chat templates are tokenised without special tokens, so
there is exactly one.
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
    """file: its jinja file without suffix.  stop: tokens that end a turn, beside the tokenizer's end token."""

    file: str
    stop: tuple[str, ...] = ()


_IM_END = ("<|im_end|>",)

TEMPLATES: dict[str, NamedTemplate] = {
    "alpaca": NamedTemplate("alpaca"),
    "chatml": NamedTemplate("chatml", _IM_END),
    "deepseek": NamedTemplate("deepseek"),
    "deepseek3": NamedTemplate("deepseek3", ("<｜end▁of▁sentence｜>",)),
    "deepseekr1": NamedTemplate("deepseekr1", ("<｜end▁of▁sentence｜>",)),
    "default": NamedTemplate("default"),
    "empty": NamedTemplate("empty"),
    "gemma": NamedTemplate("gemma", ("<end_of_turn>",)),
    "gemma2": NamedTemplate("gemma", ("<end_of_turn>",)),
    "gemma3": NamedTemplate("gemma", ("<end_of_turn>",)),
    "glm4": NamedTemplate("glm4", ("<|user|>", "<|observation|>")),
    "granite3": NamedTemplate("granite3", ("<|end_of_text|>",)),
    "internlm2": NamedTemplate("internlm2", _IM_END),
    "llama2": NamedTemplate("llama2"),
    "llama3": NamedTemplate("llama3", ("<|eot_id|>",)),
    "mistral": NamedTemplate("mistral"),
    "olmo": NamedTemplate("olmo"),
    "phi": NamedTemplate("phi3", ("<|end|>",)),
    "phi3": NamedTemplate("phi3", ("<|end|>",)),
    "phi4": NamedTemplate("phi4", _IM_END),
    "phi4_mini": NamedTemplate("phi4_mini", ("<|end|>",)),
    "qwen": NamedTemplate("qwen", _IM_END),
    "qwen3": NamedTemplate("qwen3", _IM_END),
    "qwen3_nothink": NamedTemplate("chatml", _IM_END),
    "smollm": NamedTemplate("chatml", _IM_END),
    "smollm2": NamedTemplate("smollm2", _IM_END),
    "vanilla": NamedTemplate("empty"),
    "vicuna": NamedTemplate("vicuna"),
    "yi": NamedTemplate("chatml", _IM_END),
    "zephyr": NamedTemplate("zephyr"),
}


@cache
def template_text(name: str) -> str:
    """The jinja text of a named template.  Raises ConfigError with the nearest name where it is unknown."""
    if name not in TEMPLATES:
        near = difflib.get_close_matches(name, TEMPLATES, 1, cutoff=0.5)
        known = "known: " + ", ".join(sorted(TEMPLATES))
        fix = f"did you mean {near[0]!r}? {known}" if near else known
        raise ConfigError(f"template {name!r} is unknown", where="template", fix=f"{fix}; or leave it out")
    return (FOLDER / f"{TEMPLATES[name].file}.jinja").read_text("utf-8").rstrip("\n")


def apply_template(tokenizer: Any, name: str | None) -> Any:
    """Set the tokenizer's chat template by name (None leaves its own) and return the tokenizer.

    Notes once where the template's end token is not a token of this tokenizer, because the model then has to learn to
    write it piece by piece.  Raises ConfigError for an unknown name, or where the template needs a token that the
    tokenizer lacks.
    """
    if name is None:
        return tokenizer
    text = template_text(name)
    for token in ("bos_token", "eos_token"):
        if token in text and f"{token} or" not in text and not getattr(tokenizer, token, None):
            raise ConfigError(
                f"template {name} writes the {token[:3]} token and this tokenizer has none",
                where="template",
                fix="choose a template that fits the model, or leave it out to use the tokenizer's own",
            )
    if "bos_token" not in text and _adds_bos(tokenizer):
        text = "{{- bos_token -}}" + text
    tokenizer.chat_template = text
    for stop in TEMPLATES[name].stop:
        if _token_id(tokenizer, stop) is None:
            note(f"template {name} ends turns with {stop}, which this tokenizer writes in parts")
    return tokenizer


def _adds_bos(tokenizer: Any) -> bool:
    bos = getattr(tokenizer, "bos_token_id", None)
    return bos is not None and list(tokenizer("a")["input_ids"])[:1] == [bos]


def _token_id(tokenizer: Any, text: str) -> int | None:
    found = tokenizer.convert_tokens_to_ids(text)
    return None if found is None or found == tokenizer.unk_token_id else int(found)


def stop_token_ids(tokenizer: Any) -> list[int]:
    """Ids at which generation ends: the end token, and whatever token the chat template writes after an answer.

    A base model's end token is often another one than its template's; after training on the template, the latter ends
    the answer.
    """
    ids = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]
    if not getattr(tokenizer, "chat_template", None):
        return ids
    mark = "\ue000"
    try:
        turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": mark}]
        text = str(tokenizer.apply_chat_template(turns, tokenize=False))
    except Exception:  # a template may refuse this probe; the end token remains
        return ids
    rest = text.rpartition(mark)[2].lstrip()
    after = list(tokenizer(rest, add_special_tokens=False)["input_ids"])[:1] if rest else []
    special = set(getattr(tokenizer, "all_special_ids", []))
    special |= {i for i, t in getattr(tokenizer, "added_tokens_decoder", {}).items() if getattr(t, "special", False)}
    return ids + [int(i) for i in after if i in special and i not in ids]
