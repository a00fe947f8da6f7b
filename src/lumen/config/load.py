"""From a file and overrides to one validated configuration.

    read (file:line) → overrides → renamed keys → the table of foreign keys → translations → types → rules

Every step raises ConfigError with the place of the key; whatever was accepted but changes nothing is in `notes`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from lumen.config.explain import explain, short, suggestion, user_path
from lumen.config.keys import RENAMED, foreign_keys
from lumen.config.overrides import apply_overrides, parse_overrides
from lumen.config.rules import check
from lumen.config.schema import COMMAND_LINE_ONLY, FileConfig, is_secret
from lumen.config.source import Source, read_file
from lumen.config.translate import Draft, translate
from lumen.core import ConfigError


@dataclass(frozen=True)
class LoadedConfig:
    """A validated configuration and how it came about.

    run:    the configuration; a RunConfig and an ExportConfig.
    notes:  one line for every key that was renamed, translated, or changes nothing.
    source: the file, or None.
    lines:  line of every dotted key of the file.
    given:  names of the top-level fields that were set, after renaming and translation.
    """

    run: FileConfig
    notes: list[str]
    source: Path | None = None
    lines: dict[str, int] = field(default_factory=dict)
    given: frozenset[str] = frozenset()


def load(
    path: str | Path | None,
    overrides: Sequence[str] = (),
    *,
    values: Mapping[str, Any] | None = None,
    needs: Sequence[str] = (),
) -> LoadedConfig:
    """Read, translate and validate a configuration.

    path:      a YAML or JSON file; None for overrides alone.
    overrides: command-line words (`key=value`, `--key value`, ...).
    values:    typed overrides (Python callers); names may be dotted; they win over everything.
    needs:     keys that must be set for the verb that is run.
    Raises ConfigError naming file:line or the override.
    """
    source = Source({}, "command line") if path is None else read_file(path)
    typed = {
        name: value.model_dump() if isinstance(value, BaseModel) else value for name, value in (values or {}).items()
    }
    commanded = {**parse_overrides(overrides), **typed}
    for name in COMMAND_LINE_ONLY & source.values.keys():
        flag = name.replace("_", "-")
        raise ConfigError(f"`{name}` may not stand in a file", where=source.where(name), fix=f"pass --{flag}")
    merged = dict(source.values)
    draft = Draft(merged, source, frozenset(name.split(".")[0] for name in commanded))
    _rename(merged, draft)
    apply_overrides(merged, {_renamed(name, draft): value for name, value in commanded.items()})
    _apply_table(draft)
    translate(draft)
    run = _validate(draft)
    draft.notes += check(run, draft.where)
    missing = [name for name in needs if getattr(run, name) in (None, [], "")]
    if missing:
        named = ", ".join(f"`{name}`" for name in missing)
        raise ConfigError(f"{named} must be set", where=source.name, fix=f"add `{missing[0]}: ...`")
    return LoadedConfig(run, draft.notes, None if path is None else Path(path), source.lines, frozenset(merged))


def _renamed(dotted: str, draft: Draft) -> str:
    name, dot, rest = dotted.partition(".")
    new = RENAMED.get(name)
    if new is None:
        return dotted
    draft.note(f"`{name}` is an old name: read as `{new}`")
    return f"{new}{dot}{rest}"


def _rename(values: dict[str, Any], draft: Draft) -> None:
    for old in [name for name in values if name in RENAMED]:
        new = RENAMED[old]
        if new in values:
            raise ConfigError(
                f"`{old}` is an old name of `{new}`, and both are given", where=draft.where(old), fix=f"keep `{new}`"
            )
        draft.moved[new] = old
        if values[old] is not None:
            draft.note(f"`{old}` is an old name: read as `{new}`")
        values[new] = values.pop(old)


def _apply_table(draft: Draft) -> None:
    """Drop no-op keys with a note, refuse refused ones, suggest names for unknown ones."""
    table = foreign_keys()
    unknown: list[str] = []
    for name, value in list(draft.values.items()):
        row = table.get(name)
        if name in FileConfig.model_fields or (row is not None and row.status == "acts"):
            continue
        if row is None:
            unknown.append(name)
            continue
        del draft.values[name]
        if row.is_neutral(value):
            continue
        if row.status == "refused":
            shown = "" if is_secret(name) else f": {short(value)}"
            raise ConfigError(f"`{name}{shown}` is not supported", where=draft.where(name), fix=row.why)
        draft.note(f"`{name}` changes nothing: {row.why}")
    if unknown:
        known = [*FileConfig.model_fields, *table]
        lines = [f"unknown key `{name}`{suggestion(name, known)}" for name in unknown]
        raise ConfigError("\n".join(lines), where=draft.where(unknown[0]), fix="`lumen config keys` lists every key")


def _validate(draft: Draft) -> FileConfig:
    try:
        return FileConfig(**draft.values)
    except ValidationError as failure:
        lines: list[str] = []
        places: list[str] = []
        for error in failure.errors(include_url=False):
            dotted = user_path(error["loc"])
            place = draft.where(dotted)
            line = explain(dotted, error)
            start, _, got = line.partition(", got ")
            before = f"`{dotted}` must be "
            if lines and start.startswith(before) and lines[-1].startswith(before) and lines[-1].endswith(got):
                first = lines[-1].partition(", got ")[0]  # two branches of a union: one line
                line = f"{first} or {start.removeprefix(before)}" + (f", got {got}" if got else "")
                lines.pop()
            if line not in lines:
                lines.append(line)
            if place not in places:
                places.append(place)
        raise ConfigError("\n".join(lines), where=", ".join(places)) from None
