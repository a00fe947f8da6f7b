"""Words for what is wrong with a key or a value."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel

from lumen.config.schema import FileConfig, is_secret, section


def suggestion(name: str, known: Sequence[str]) -> str:
    """`; did you mean ...?`, or nothing."""
    close = difflib.get_close_matches(name.lower().replace("-", "_"), known, n=1, cutoff=0.6)
    return f"; did you mean `{close[0]}`?" if close else ""


def short(value: Any) -> str:
    """A value as the user wrote it, cut to 60 characters."""
    text = str(value).lower() if isinstance(value, bool) else "null" if value is None else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def user_path(location: tuple[Any, ...]) -> str:
    """The user's dotted key of a pydantic error: its location without the branches of unions."""
    parts: list[str] = []
    model: type[BaseModel] | None = FileConfig
    for step in location:
        if isinstance(step, int):
            parts.append(str(step))
        elif model is not None and (step in model.model_fields or (step == location[-1] and step.isidentifier())):
            parts.append(step)
            model = section(model, step)
    return ".".join(parts)


_EXPECTED = {
    "int": "a whole number", "float": "a number", "bool": "true or false", "string": "text", "list": "a list",
    "dict": "a section", "model": "a section", "finite": "a finite number",
}  # fmt: skip

_BOUNDS = {
    "greater_than_equal": ("at least", "ge"), "less_than_equal": ("at most", "le"),
    "greater_than": ("more than", "gt"), "less_than": ("less than", "lt"),
}  # fmt: skip


def explain(dotted: str, error: Any) -> str:
    """One line for a pydantic error; a secret's value is not shown."""
    kind, value = error["type"], error.get("input")
    got = "" if any(is_secret(part) for part in dotted.split(".")) else f", got {short(value)}"
    if kind == "extra_forbidden":
        head, _, last = dotted.rpartition(".")
        model: type[BaseModel] | None = FileConfig
        for part in head.split(".") if head else []:
            if model is not None and not part.isdigit():
                model = section(model, part)
        return f"unknown key `{dotted}`{suggestion(last, list(model.model_fields) if model else [])}"
    if kind == "missing":
        return f"`{dotted}` is missing"
    if kind == "literal_error":
        return f"`{dotted}` must be one of {error['ctx']['expected'].replace(' or ', ', ')}{got}"
    if kind == "value_error":
        return f"`{dotted}`: {error['msg'].removeprefix('Value error, ')}{got}"
    if kind in _BOUNDS:
        words, key = _BOUNDS[kind]
        return f"`{dotted}` must be {words} {error['ctx'][key]}{got}"
    if kind == "string_pattern_mismatch":
        return f"`{dotted}` must be written like {error['ctx']['pattern'].strip('^$')}{got}"
    for start, expected in _EXPECTED.items():
        if kind.startswith(start):
            if value is None:
                return f"`{dotted}` is empty (null); give {expected} or remove the line"
            return f"`{dotted}` must be {expected}{got}"
    return f"`{dotted}`: {error['msg'][:1].lower()}{error['msg'][1:]}{got}"
