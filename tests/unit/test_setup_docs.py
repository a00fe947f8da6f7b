"""The documentation checker finds what it is there to find."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_spec = importlib.util.spec_from_file_location("docs_check", ROOT / "scripts" / "docs_check.py")
assert _spec is not None and _spec.loader is not None
docs_check = importlib.util.module_from_spec(_spec)
sys.modules["docs_check"] = docs_check
_spec.loader.exec_module(docs_check)


def problems(tmp_path: Path, text: str) -> list[str]:
    (tmp_path / "other.md").write_text("# A heading: with `code`\n")
    page = tmp_path / "page.md"
    page.write_text(text)
    found = docs_check.check_file(page, tmp_path, docs_check.targets(ROOT))
    return [line.partition(": ")[2] for line in found]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[gone](gone.md)", "link to gone.md"),
        ("[x](other.md#nothing)", "no such heading"),
        ("run `make tset`", "`make tset` is not a target"),
        ("```bash\nmake demos\n```", "`make demos` is not a target"),
        ("`lumen hardwear --json`", "`lumen hardwear` is not built"),
        ("```\nlumen hardware --jsn\n```", "no option --jsn"),
        ("see `docs/gone.md`", "does not exist"),
        ("```yaml\nmodel_name_or_path: x\nlora_rnak: 8\n```", "lora_rank"),
    ],
)
def test_what_is_wrong_is_found(text: str, problem: str, tmp_path: Path) -> None:
    found = problems(tmp_path, f"# Page\n\n{text}\n")
    assert len(found) == 1 and problem in found[0], found


def test_what_is_right_is_left_alone(tmp_path: Path) -> None:
    text = (
        "# Page\n\n[a](other.md#a-heading-with-code) [b](https://example.org/x) [c](#page)\n"
        "`make test` and make sure; `lumen hardware --json`, we say lumen trains models\n"
        "```yaml\nkey_of_something_else: 1\n```\n"
    )
    assert problems(tmp_path, text) == []
