"""`key=value`, `section.key=value`, `--key value`, `--key=value` and `--flag` on the command line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lumen.config.source import parse_value
from lumen.core import ConfigError


def parse_overrides(arguments: Sequence[str]) -> dict[str, Any]:
    """Dotted key → value, in order; a later one wins.

    `--key` followed by nothing, or by another `--key` or `key=value`, is true; dashes in a name are underscores.
    Raises ConfigError for a word that is no override.
    """
    found: dict[str, Any] = {}
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        name, equals, text = word.removeprefix("--").partition("=")
        if word.startswith("--") and not equals:
            if rest and not rest[0].startswith("--") and not _is_assignment(rest[0]):
                value = parse_value(rest.pop(0))
            else:
                value = True
        elif equals:
            value = parse_value(text)
        else:
            raise ConfigError(
                f"`{word}` is not an override", where="command line", fix="write key=value, --key value or --key=value"
            )
        name = name.replace("-", "_")
        if not name or not all(part.isidentifier() for part in name.split(".")):
            raise ConfigError(f"`{word}` has no key", where="command line", fix="write key=value or section.key=value")
        found[name] = value
    return found


def apply_overrides(values: dict[str, Any], overrides: dict[str, Any]) -> None:
    """Set dotted keys in nested `values`, in place; `quant: int8` in the file counts as `quant: {recipe: int8}`."""
    for dotted, value in overrides.items():
        *sections, last = dotted.split(".")
        target = values
        for name in sections:
            inner = target.get(name)
            if name == "quant" and isinstance(inner, str):
                inner = {"recipe": inner}
            if inner is None:
                inner = {}
            if not isinstance(inner, dict):
                raise ConfigError(
                    f"`{dotted}` cannot be set: `{name}` is not a section", where=f"command line: {dotted}"
                )
            target[name] = dict(inner)
            target = target[name]
        target[last] = value


def _is_assignment(word: str) -> bool:
    name, equals, _ = word.partition("=")
    return bool(equals) and all(part.isidentifier() for part in name.split("."))
