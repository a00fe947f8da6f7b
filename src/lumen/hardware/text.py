"""The few shapes in which Linux prints its facts."""

from __future__ import annotations


def number(text: str, default: int = 0) -> int:
    """The first word as a number (also 0x…), or the default."""
    try:
        return int(text.strip().split()[0], 0)
    except (ValueError, IndexError):
        return default


def pairs(text: str, separator: str | None = None) -> dict[str, str]:
    """`key value` or `key: value` lines as a dict; the first of equal keys stays."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        key, _, value = line.partition(separator) if separator else line.partition(" ")
        if key.strip():
            found.setdefault(key.strip(), value.strip())
    return found


def version_pair(text: str) -> tuple[int, int] | None:
    """(major, minor) of the first `7.2…` in a text, or None."""
    import re

    match = re.search(r"(\d+)\.(\d+)", text)
    return (int(match[1]), int(match[2])) if match else None
