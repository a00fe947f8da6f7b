"""The pages made from the schema and the table: `lumen config keys`."""

from __future__ import annotations

import json
from typing import Any

from lumen.config.keys import foreign_keys
from lumen.config.schema import COMMAND_LINE_ONLY, FileConfig, owners


def default_text(name: str) -> str:
    """A field's default as it would stand in YAML."""
    info = FileConfig.model_fields[name]
    value: Any = info.get_default(call_default_factory=True)
    if hasattr(value, "model_dump"):
        return json.dumps(value.model_dump(mode="json", exclude_defaults=True))
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return ",".join(value)
    return json.dumps(value) if not isinstance(value, str) else value


def described(name: str) -> str:
    """A field's docstring on one line, without its default."""
    return " ".join((FileConfig.model_fields[name].description or "").split())


def key_lines(part: str = "") -> list[str]:
    """Every key that holds `part`: our fields by room, then foreign keys by status."""
    lines: list[str] = []
    for _, names in owners():
        for name in names:
            if part in name and name not in COMMAND_LINE_ONLY:
                lines.append(f"{name:<32} acts     {described(name)}")
    for row in foreign_keys().values():
        if part in row.name and row.name not in FileConfig.model_fields:
            lines.append(f"{row.name:<32} {row.status:<8} {row.why} ({row.origin})")
    return lines
