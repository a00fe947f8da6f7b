"""The table of foreign keys is complete, honest, and agrees with the tools it is about."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from lumen.config import RENAMED, FileConfig, foreign_keys, load
from lumen.config.schema import COMMAND_LINE_ONLY, is_secret, owners
from lumen.core import ConfigError

ROOT = Path(__file__).parents[2]
SRC = ROOT / "src" / "lumen"
NAMES = ROOT / "tests" / "fixtures" / "configs" / "foreign_keys.txt"


def foreign_names() -> list[str]:
    lines = [line for line in NAMES.read_text().splitlines() if not line.startswith("#")]
    return sorted({name for line in lines for name in line.split()})


def test_every_key_of_llamafactory_and_transformers_has_a_status() -> None:
    table = foreign_keys()
    names = foreign_names()
    assert len(names) > 400
    assert [name for name in names if name not in table and name not in FileConfig.model_fields] == []


def test_the_installed_transformers_has_no_key_we_do_not_know() -> None:
    from transformers import Seq2SeqTrainingArguments

    known = set(foreign_keys()) | set(FileConfig.model_fields)
    names = {field.name for field in dataclasses.fields(Seq2SeqTrainingArguments) if field.init}
    assert names - known == set()


def test_a_field_has_no_row() -> None:
    """A key that acts because it is a field must not also stand in the table as a no-op or refused."""
    assert [name for name in foreign_keys() if name in FileConfig.model_fields] == []
    assert set(RENAMED.values()) <= set(FileConfig.model_fields)


def test_defaults_are_those_of_transformers() -> None:
    """Where a key is theirs, so is its default; the exceptions are deliberate and said on the page."""
    from transformers import Seq2SeqTrainingArguments

    ours = {"optim", "report_to", "logging_steps", "do_train"}  # the first two are the same under another name
    for field in dataclasses.fields(Seq2SeqTrainingArguments):
        if field.name in FileConfig.model_fields and field.name not in ours:
            assert FileConfig.model_fields[field.name].default == field.default, field.name


def test_neutral_values_are_the_defaults_of_transformers() -> None:
    from transformers import Seq2SeqTrainingArguments

    table = foreign_keys()
    wrong = []
    for field in dataclasses.fields(Seq2SeqTrainingArguments):
        row = table.get(field.name)
        if row is None or row.status == "acts":
            continue
        default = field.default if field.default is not dataclasses.MISSING else field.default_factory()  # type: ignore[misc]
        if not row.is_neutral(default):
            wrong.append((field.name, default, row.neutral))
    assert wrong == []


@pytest.mark.parametrize("row", foreign_keys().values(), ids=lambda row: row.name)
def test_each_row_does_what_its_status_says(row, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """At its neutral value a key is silent; otherwise a no-op notes itself and a refused key raises, both by name."""
    import yaml

    path = tmp_path / "run.yaml"
    assert row.why and "\n" not in row.why
    if row.status == "acts":
        return
    path.write_text(yaml.safe_dump({row.name: row.neutral}))
    assert load(path).notes == []
    other = {True: False, False: True}.get(row.neutral, "something") if isinstance(row.neutral, bool) else "something"
    path.write_text(yaml.safe_dump({row.name: other}))
    if row.status == "no-op":
        loaded = load(path)
        assert len(loaded.notes) == 1 and loaded.notes[0].startswith(f"`{row.name}` changes nothing: ")
    else:
        with pytest.raises(ConfigError, match=f"`{row.name}.*` is not supported") as caught:
            load(path)
        assert caught.value.where.endswith(":1") and caught.value.fix == row.why


def readers(name: str) -> list[Path]:
    """Files outside the configuration classes in which a field is read by name."""
    pattern = re.compile(rf"(?:config|cfg|run|settings)\.{name}\b")
    files = [p for p in SRC.rglob("*.py") if p.name != "config.py" and p.relative_to(SRC).parts[0] != "config"]
    return [path for path in files if pattern.search(path.read_text(encoding="utf-8"))]


def test_every_field_is_read_somewhere() -> None:
    """Nothing accepted is ignored: a field that no code reads must be refused instead."""
    assert [name for name in FileConfig.model_fields if not readers(name)] == []


def test_every_field_has_one_owner() -> None:
    owned = [name for _, names in owners() for name in names]
    assert len(owned) == len(set(owned)), "two mixins define the same field"
    assert set(owned) == set(FileConfig.model_fields)


def test_secret_names() -> None:
    assert is_secret("hf_hub_token") and is_secret("swanlab_api_key") and is_secret("hub_token")
    assert not is_secret("lora_rank") and not is_secret("skip_special_tokens") and COMMAND_LINE_ONLY
