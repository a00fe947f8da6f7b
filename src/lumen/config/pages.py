"""The pages made from the schema and the table, so that they cannot differ from the code.

`python -m lumen.config.pages [ROOT]` writes docs/configuration.md and examples/full.yaml below a checkout; a test holds
that the committed ones are current.  `lumen config keys` prints the same facts.
"""

from __future__ import annotations

import json
import sys
import textwrap
import types
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, SecretStr

from lumen.config.keys import RENAMED, foreign_keys
from lumen.config.schema import COMMAND_LINE_ONLY, FileConfig, choices, owners, section
from lumen.config.table import Key
from lumen.core.files import atomic_write_text


def default_text(model: type[BaseModel], name: str) -> str:
    """A field's default as it stands in YAML."""
    info = model.model_fields[name]
    if info.is_required():
        return ""
    value: Any = info.get_default(call_default_factory=True)
    if isinstance(value, BaseModel):
        return "{}"
    if isinstance(value, list) and value and all(isinstance(item, str) for item in value):
        return ", ".join(value)
    if isinstance(value, float):
        return f"{value:g}"
    return value if isinstance(value, str) and value else json.dumps(value)


def type_text(model: type[BaseModel], name: str) -> str:
    """A field's type in the words of a user."""
    return _words(model.model_fields[name].annotation, choices(model, name))


def _words(annotation: Any, allowed: list[Any]) -> str:
    if allowed:
        return ", ".join(map(str, allowed))
    if get_origin(annotation) is Literal:
        return ", ".join(map(str, get_args(annotation)))
    names = {int: "integer", float: "number", bool: "true, false", str: "text", SecretStr: "text", type(None): ""}
    origin = get_origin(annotation)
    if hasattr(annotation, "__metadata__"):
        return _words(get_args(annotation)[0], allowed)
    if origin in (Union, types.UnionType):
        parts = [_words(part, allowed) for part in get_args(annotation)]
        return " or ".join(part for part in parts if part)
    if origin is list:
        return f"list of {_words(get_args(annotation)[0], allowed)}".replace("list of text", "list")
    return names.get(annotation, "section")


def described(model: type[BaseModel], name: str) -> str:
    """A field's docstring on one line."""
    return " ".join((model.model_fields[name].description or "").split())


def nested(name: str) -> type[BaseModel] | None:
    """The section's model where a field of the configuration is a section."""
    return section(FileConfig, name)


def _fields(model: type[BaseModel], names: list[str]) -> list[tuple[str, str, type[BaseModel], str]]:
    """(dotted key, field, model, indentation) of fields and of those of their sections."""
    rows: list[tuple[str, str, type[BaseModel], str]] = []

    def visit(owner: type[BaseModel], field: str, dotted: str, indent: str) -> None:
        rows.append((dotted, field, owner, indent))
        inner = section(owner, field)
        if inner is not None and isinstance(owner.model_fields[field].default, BaseModel):  # not a list of sections
            for nested in inner.model_fields:
                visit(inner, nested, f"{dotted}.{nested}", indent + "  ")

    for name in names:
        if name not in COMMAND_LINE_ONLY:
            visit(model, name, name, "")
    return rows


def key_lines(part: str = "") -> list[str]:
    """Every key that holds `part`: our fields by room, then foreign keys."""
    lines: list[str] = []
    for mixin, names in owners():
        for dotted, field, model, _ in _fields(mixin, names):
            if part in dotted:
                lines.append(f"{dotted:<34} acts     {described(model, field)}")
    lines += [f"{row.name:<34} {row.status:<8} {row.why} ({row.origin})"
              for row in foreign_keys().values() if part in row.name]  # fmt: skip
    return lines


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("*", "\\*").replace("<", "&lt;")


def _why(row: Key) -> str:
    return _cell(row.why[:1].upper() + row.why[1:])


def configuration_page() -> str:
    """docs/configuration.md."""
    lines = [
        "# Configuration",
        "",
        "<!-- made by `python -m lumen.config.pages`; edit the docstrings and the table, not this page -->",
        "",
        "A run is one flat YAML file. The keys are LLaMA-Factory's and Hugging Face's, with their defaults, so files",
        "written for LLaMA-Factory run unchanged; Lumen's own section is `quant:`. `lumen train run.yaml key=value`,",
        "`section.key=value`, `--key value` and `--key=value` override the file. `lumen config validate FILE` prints",
        "what a file resolves to, `lumen config schema` the JSON schema for an editor, `lumen config keys NAME` this",
        "table.",
        "[examples/full.yaml](../examples/full.yaml) holds every key with its default; `recipes/` holds ready runs.",
        "",
        "- An unknown key is an error that names the line and the nearest key; so is a key given twice.",
        "- Text that reads as a number is one (`1e-4`). A bare `no`, `on` or `off` is the word where a word is due.",
        "- An empty value (`key:`) is null; where null is no value it is an error, never a silent default.",
        "- Two keys that exclude each other are an error that names both and the choices.",
        "- A key of another tool acts, or is accepted and a note says why it changes nothing, or is refused by name.",
        "  At the value with which it does nothing in its own tool (`deepspeed: null`, `fp8: false`) it is silent.",
        "- Defaults are theirs, but for three: `logging_steps` is 10 (HF: 500), `plot_loss` and `do_train` are true.",
        "- An `output_dir` that holds a checkpoint is resumed, unless `overwrite_output_dir: true`.",
        "- `trust_remote_code: true` is accepted and changes nothing where the architecture is built in; a model that",
        "  ships its own code is refused unless `--allow-remote-code` is given on the command line.",
        "",
    ]
    for mixin, names in owners():
        lines += [
            f"## {_title(mixin)}",
            "",
            (mixin.__doc__ or "").strip(),
            "",
            "| key | values | meaning |",
            "| --- | --- | --- |",
        ]
        for dotted, field, model, _ in _fields(mixin, names):
            lines.append(f"| `{dotted}` | {_cell(type_text(model, field))} | {_cell(described(model, field))} |")
        lines.append("")
    rows = sorted(foreign_keys().values(), key=lambda row: row.name)
    for status, title, about in (
        ("acts", "Keys of other tools that act", "They are read as one of the keys above."),
        ("no-op", "Keys of other tools that change nothing", "They are accepted; a note says why they change nothing."),
        (
            "refused",
            "Keys of other tools that are refused",
            "They raise an error unless they stand at the value shown.",
        ),
    ):
        lines += [f"## {title}", "", about, ""]
        if status == "acts":
            lines += ["| key | of | meaning |", "| --- | --- | --- |"]
            lines += [f"| `{row.name}` | {row.origin} | {_why(row)} |" for row in rows if row.status == status]
        else:
            lines += ["| key | of | silent at | why |", "| --- | --- | --- | --- |"]
            lines += [f"| `{row.name}` | {row.origin} | {_cell(json.dumps(row.neutral))} | {_why(row)} |"
                      for row in rows if row.status == status]  # fmt: skip
        lines.append("")
    return "\n".join(lines)


def _title(mixin: type[BaseModel]) -> str:
    titles = {"models": "Model", "adapters": "Method", "data": "Data", "memory": "Memory", "monitor": "Reports",
              "objectives": "Objective", "optim": "Optimizer", "quant": "Quantisation", "generate": "Generation",
              "export": "Export", "trainer": "Training"}  # fmt: skip
    return titles[mixin.__module__.split(".")[1]]


def full_example() -> str:
    """examples/full.yaml: every key at its default, with its meaning."""
    lines = [
        "# Every key of a Lumen configuration, each at its default.",
        "# Made by `python -m lumen.config.pages`; delete what you do not need. A short file is enough:",
        "# model_name_or_path, dataset and output_dir are the only keys that training asks for.",
    ]
    wanted = {"model_name_or_path": "HuggingFaceTB/SmolLM2-135M-Instruct", "dataset": "data/rows.jsonl",
              "output_dir": "runs/first"}  # fmt: skip
    old = {new: name for name, new in RENAMED.items()}
    for mixin, names in owners():
        lines += ["", f"### {_title(mixin)}: {(mixin.__doc__ or '').strip()}"]
        for dotted, field, model, indent in _fields(mixin, names):
            text = described(model, field) + (f" Old name: {old[dotted]}." if dotted in old else "")
            lines += ["", *(f"{indent}# {line}" for line in textwrap.wrap(text, 116 - len(indent)))]
            if allowed := choices(model, field):
                lines += [f"{indent}# values: {line}" for line in textwrap.wrap(", ".join(map(str, allowed)), 100)]
            value = wanted.get(field, default_text(model, field)) if not indent else default_text(model, field)
            lines.append(f"{indent}{field}:" if value == "{}" else f"{indent}{field}: {_quoted(value)}")
    return "\n".join(lines) + "\n"


def _quoted(value: str) -> str:
    return f'"{value}"' if value in ("no", "on", "off") else value


def pages() -> dict[str, str]:
    """Path below the checkout → text."""
    return {"docs/configuration.md": configuration_page(), "examples/full.yaml": full_example()}


if __name__ == "__main__":
    root = Path(sys.argv[1] if len(sys.argv) > 1 else ".")
    for path, text in pages().items():
        atomic_write_text(root / path, text)
        print(path)
