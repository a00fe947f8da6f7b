"""What goes beside the weights of every export: licence files of the base, and a model card that names the licence."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lumen.adapters.card import render_card
from lumen.core.files import atomic_write_text
from lumen.models.source import resolve_source

_LICENCE_FILE = re.compile(r"(LICEN[CS]E|NOTICE|USE_POLICY)", re.IGNORECASE)


def licence_of(config: Any) -> tuple[str | None, list[Path]]:
    """The licence that a local base's model card names (None: none found), and its licence files."""
    source = resolve_source(config)
    root = Path(source.path)
    if not root.is_dir():
        return None, []
    files = [path for path in sorted(root.iterdir()) if path.is_file() and _LICENCE_FILE.match(path.name)]
    name = _gguf_licence(root / source.gguf_file) if source.gguf_file else None
    card = root / "README.md"
    if name is None and card.is_file():
        header = card.read_text(encoding="utf-8", errors="replace").split("---")
        found = re.search(r"^license:\s*['\"]?([\w.-]+)", header[1], re.MULTILINE) if len(header) > 2 else None
        name = found.group(1) if found else None
    return name, files


def _gguf_licence(path: Path) -> str | None:
    from gguf import GGUFReader

    field = GGUFReader(path).get_field("general.license")
    return str(field.contents()) if field is not None else None


def write_card(
    folder: Path,
    *,
    title: str,
    base: str,
    license_name: str | None,
    licence_files: Iterable[Path] = (),
    tables: dict[str, Any],
    text: str = "",
) -> None:
    """README.md with the hub's YAML header, a line on the licence and tables of facts; copies the licence files."""
    for path in licence_files:
        shutil.copyfile(path, folder / path.name)
    licence = (
        f"Licence of the base model: {license_name}; it binds the use of these files."
        if license_name
        else "Its use is bound by the licence of the base model."
    )
    card = {"title": title, "base": base, "summary": f"Written by Lumen. {licence}", "license": license_name, **tables}
    atomic_write_text(folder / "README.md", render_card(card) + (f"\n{text}\n" if text else ""))
