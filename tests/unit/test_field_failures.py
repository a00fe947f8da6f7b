"""docs/field-failures.md names a test for every failure, and each of them exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_failure_has_a_test_that_exists() -> None:
    page = (ROOT / "docs" / "field-failures.md").read_text(encoding="utf-8")
    rows = [line for line in page.splitlines() if line.startswith("| ") and not line.startswith("| what ")]
    named = [re.findall(r"`(test_\w+)`", row) for row in rows if not row.startswith("| ---")]
    assert len(named) > 30 and all(len(names) == 1 for names in named)
    defined = {
        node.name
        for path in (ROOT / "tests").rglob("test_*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef)
    }
    assert not {names[0] for names in named} - defined


def test_every_row_of_the_machine_room_is_there() -> None:
    """The rows marked R (machine room) of the collected failures, by words that only they have."""
    page = (ROOT / "docs" / "field-failures.md").read_text(encoding="utf-8")
    for words in ("/dev/kfd", "HSA_OVERRIDE_GFX_VERSION", "an APU", "iommu=pt", "WSL", "silently wrong"):
        assert any(words in line and "`test_" in line for line in page.splitlines()), words
