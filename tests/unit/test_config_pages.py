"""The committed pages are those that the schema and the table make, and the ready runs load."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from lumen.config import FileConfig, foreign_keys, load
from lumen.config.pages import pages

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))


@pytest.mark.parametrize("path", pages())
def test_the_committed_page_is_current(path: str) -> None:
    assert (ROOT / path).read_text(encoding="utf-8") == pages()[path], "run `python -m lumen.config.pages`"


def test_the_page_names_every_key() -> None:
    page = pages()["docs/configuration.md"]
    for name in [*FileConfig.model_fields, *foreign_keys()]:
        assert f"| `{name}` |" in page or name == "allow_remote_code", name


def test_the_full_example_is_the_defaults() -> None:
    loaded = load(ROOT / "examples" / "full.yaml")
    own = ("model_name_or_path", "dataset", "output_dir")
    default = FileConfig(**{name: getattr(loaded.run, name) for name in own})
    assert loaded.notes == [] and loaded.run == default
    assert set(loaded.given) == set(FileConfig.model_fields) - {"allow_remote_code"}


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_ready_run_loads_without_notes(path: Path) -> None:
    loaded = load(path, needs=("model_name_or_path", "dataset", "output_dir"))
    assert loaded.notes == []
    text = path.read_text(encoding="utf-8")
    assert text.startswith("# ") and len(text.splitlines()) < 40, "says what it is for, and is short"


def test_ready_runs_do_not_repeat_each_other() -> None:
    """At most 60 % of the shorter file's lines stand in another one too."""
    assert len(RECIPES) >= 5
    for i, first in enumerate(RECIPES):
        for second in RECIPES[i + 1 :]:
            a, b = _lines(first), _lines(second)
            assert len(a & b) <= 0.6 * min(len(a), len(b)), f"{first.name} and {second.name}"


def _lines(path: Path) -> set[str]:
    return {line for line in path.read_text().splitlines() if line and not line.startswith("#")}


def test_config_verbs(tmp_path: Path) -> None:
    def lumen(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, "-m", "lumen", *words], cwd=ROOT, env=_environment(), text=True,
                              capture_output=True)  # fmt: skip

    shown = lumen("config", "validate", str(RECIPES[0]), "lora_rank=4")
    assert shown.returncode == 0 and yaml.safe_load(shown.stdout)["lora_rank"] == 4
    broken = tmp_path / "run.yaml"
    broken.write_text("lora_rnak: 8\n")
    failed = lumen("config", "validate", str(broken))
    assert failed.returncode == 2 and "did you mean `lora_rank`?" in failed.stderr and "Traceback" not in failed.stderr


def _environment() -> dict[str, str]:
    import os

    return {**os.environ, "PYTHONPATH": str(ROOT / "src")}
