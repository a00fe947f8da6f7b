"""The command: what it prints and the status it leaves with."""

from __future__ import annotations

import subprocess
import sys
import types
from pathlib import Path

import pytest

from lumen.cli import main as command
from lumen.cli.arguments import split
from lumen.core import LumenError

SRC = Path(__file__).resolve().parents[2] / "src"


@pytest.fixture
def verb(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A verb `probe` whose `main` a test sets."""
    module = types.ModuleType("lumen.cli.probe")
    monkeypatch.setitem(sys.modules, "lumen.cli.probe", module)
    monkeypatch.setattr(command, "built_verbs", lambda: {"probe": "a verb of this test"})
    return module


def raising(error: BaseException):  # type: ignore[no-untyped-def]
    def main(argv: list[str]) -> int:
        raise error

    return main


def test_arguments_reach_the_verb_and_its_status_leaves(verb: types.ModuleType) -> None:
    seen: list[list[str]] = []
    verb.main = lambda argv: seen.append(argv) or 7  # type: ignore[attr-defined]
    assert command.run(["probe", "a", "--b"]) == 7
    assert seen == [["a", "--b"]]


def test_a_users_mistake_has_no_traceback(verb: types.ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    verb.main = raising(LumenError("it is wrong", where="run.yaml:3", fix="write it so"))  # type: ignore[attr-defined]
    assert command.run(["probe"]) == 2
    shown = capsys.readouterr().err
    assert shown == "error: it is wrong\n  where: run.yaml:3\n  fix:   write it so\n"


def test_a_bug_shows_its_traceback_and_asks_for_a_report(
    verb: types.ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    verb.main = raising(ZeroDivisionError("oops"))  # type: ignore[attr-defined]
    assert command.run(["probe"]) == 1
    shown = capsys.readouterr().err
    assert "Traceback" in shown and "ZeroDivisionError: oops" in shown and "please report it" in shown


def test_ctrl_c_is_130(verb: types.ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    verb.main = raising(KeyboardInterrupt())  # type: ignore[attr-defined]
    assert command.run(["probe"]) == 130
    assert "Traceback" not in capsys.readouterr().err


def test_help_lists_built_verbs_only_and_each_has_a_main(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.run(["--help"]) == 0
    shown = capsys.readouterr().out
    for name, line in command.VERBS.items():
        built = name in command.built_verbs()
        assert (f"  {name} " in shown and line in shown) == built
    assert {"train", "config"} <= set(command.built_verbs())


@pytest.mark.parametrize("name", command.built_verbs())
def test_every_verb_explains_itself(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status = command.run([name, "--help"])
    except SystemExit as done:  # argparse ends the process itself
        status = int(done.code or 0)
    assert status == 0
    assert f"lumen {name}" in capsys.readouterr().out


def test_an_unknown_verb_suggests(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.run(["trian"]) == 2
    assert "did you mean `lumen train`" in capsys.readouterr().err
    assert command.run([]) == 2


def test_split_takes_a_command_line_apart() -> None:
    found = split(["run.yaml", "a=1", "--b", "2", "--c=3", "--dry-run", "--d"], {"--dry-run": "help"})
    assert found.file == "run.yaml" and found.flags == {"--dry-run"} and not found.help
    assert found.overrides == ["a=1", "--b", "2", "--c=3", "--d"]
    assert split(["--bf16", "a=1"]).overrides == ["--bf16", "a=1"]
    assert split(["x", "-h"]).help
    with pytest.raises(LumenError, match=r"`two\.yaml` is not understood"):
        split(["one.yaml", "two.yaml"])


def test_the_terminal_stays_quiet_about_installed_bystanders() -> None:
    """transformers imports torchao and PEFT bitsandbytes where they are installed; their warnings say nothing useful.

    Without `quiet_bystanders()` this fails wherever the two are installed (the dev extra has both).
    """
    code = "from lumen.cli.main import run; run(['train', 'no-such-file.yaml']); import transformers, peft"
    done = subprocess.run([sys.executable, "-c", code], check=True, cwd=SRC, capture_output=True, text=True)
    assert "Failed to load" not in done.stderr and "_pytree" not in done.stderr
    assert len(done.stderr.strip().splitlines()) <= 4  # our own error: what, where, fix
