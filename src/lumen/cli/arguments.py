"""Arguments of verbs that take a configuration file and overrides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lumen.core.errors import ConfigError

if TYPE_CHECKING:
    from lumen.config import LoadedConfig


@dataclass(frozen=True)
class Arguments:
    """A verb's command line, taken apart.

    file:      the configuration file, or None.
    overrides: words for `lumen.config.load`.
    flags:     the verb's own switches that were given.
    help:      whether -h or --help was among them.
    """

    file: str | None
    overrides: list[str] = field(default_factory=list)
    flags: frozenset[str] = frozenset()
    help: bool = False


def split(argv: Sequence[str], flags: Mapping[str, str] | Sequence[str] = ()) -> Arguments:
    """Take `argv` apart: the first plain word is the file, `flags` (like `--dry-run`) are the verb's own.

    `flags` maps a flag to its help line; everything else is an override.  Raises ConfigError for a second plain word.
    """
    file: str | None = None
    overrides: list[str] = []
    found: set[str] = set()
    rest = list(argv)
    while rest:
        word = rest.pop(0)
        if word in ("-h", "--help"):
            return Arguments(file, overrides, frozenset(found), help=True)
        if word in flags:
            found.add(word)
        elif word.startswith("--"):
            overrides.append(word)
            if "=" not in word and rest and not rest[0].startswith("--") and not _is_assignment(rest[0]):
                if file is None and _is_file(rest[0]):
                    continue  # `--flag run.yaml`: the word after it is the file
                overrides.append(rest.pop(0))
        elif _is_assignment(word):
            overrides.append(word)
        elif file is None and not word.startswith("-"):
            file = word
        else:
            raise ConfigError(
                f"`{word}` is not understood", where="command line", fix="give one file, then key=value or --key value"
            )
    return Arguments(file, overrides, frozenset(found))


def take(argv: Sequence[str], option: str) -> tuple[list[str], list[str]]:
    """Every value of a verb's own option (`--prompt TEXT`, `--prompt=TEXT`), and the words that remain."""
    values: list[str] = []
    rest: list[str] = []
    words = list(argv)
    while words:
        word = words.pop(0)
        if word == option:
            if not words:
                raise ConfigError(f"{option} needs a value", where="command line", fix=f"{option} VALUE")
            values.append(words.pop(0))
        elif word.startswith(option + "="):
            values.append(word[len(option) + 1 :])
        else:
            rest.append(word)
    return values, rest


def is_config_file(word: str) -> bool:
    """Whether a plain word names a configuration file rather than a model."""
    return Path(word).suffix in (".yaml", ".yml", ".json")


def whole_number(text: str, option: str) -> int:
    """A positive whole number given to an option."""
    if not text.isdigit() or int(text) < 1:
        raise ConfigError(f"{option} {text} is no number", where="command line", fix="1 or more")
    return int(text)


def renamed(argv: Sequence[str], names: Mapping[str, str]) -> list[str]:
    """`argv` with a verb's short options (`--model X`, `--model=X`) as the keys that they stand for."""
    words = []
    for word in argv:
        option, equals, value = word.partition("=")
        words.append(f"--{names[option]}{equals}{value}" if option in names else word)
    return words


_ANSWER_FLAGS = ("--allow-remote-code", "--greedy")
_ANSWER_KEYS = {"--adapter": "adapter_name_or_path", "--model": "model_name_or_path", "--system": "default_system"}


def split_for_answers(argv: Sequence[str]) -> Arguments:
    """`split` for the verbs that answer (chat, generate): their short options and switches."""
    return split(renamed(argv, _ANSWER_KEYS), _ANSWER_FLAGS)


def load_for_answers(arguments: Arguments, *, fix: str) -> LoadedConfig:
    """The configuration of a verb that answers; its plain word is a configuration file or a model.  Says the notes.

    Raises ConfigError with `fix` where neither a model nor an adapter is named.
    """
    from lumen.config import load
    from lumen.core import note

    values: dict[str, Any] = {}
    file = arguments.file
    if file is not None and not is_config_file(file):
        values["model_name_or_path"], file = file, None
    if "--allow-remote-code" in arguments.flags:
        values["allow_remote_code"] = True
    if "--greedy" in arguments.flags:
        values["do_sample"] = False
    loaded = load(file, arguments.overrides, values=values)
    for line in loaded.notes:
        note(line)
    if not loaded.run.model_name_or_path and not loaded.run.adapter_name_or_path:
        raise ConfigError("no model was given", where="command line", fix=fix)
    return loaded


EXPORT_FLAGS = ("--allow-unchanged", "--no-verify", "--json", "--allow-remote-code")


def load_for_export(arguments: Arguments) -> LoadedConfig:
    """The configuration of `merge` and `export`, its notes printed; `--no-verify` is `export_verify: false`."""
    from lumen.config import load
    from lumen.core import note

    values: dict[str, object] = {}
    if "--allow-remote-code" in arguments.flags:
        values["allow_remote_code"] = True
    if "--no-verify" in arguments.flags:
        values["export_verify"] = False
    loaded = load(arguments.file, arguments.overrides, values=values, needs=("export_dir",))
    for line in loaded.notes:
        note(line)
    return loaded


def _is_assignment(word: str) -> bool:
    name, equals, _ = word.partition("=")
    return bool(equals) and all(part.isidentifier() for part in name.split("."))


def _is_file(word: str) -> bool:
    return Path(word).suffix in (".yaml", ".yml", ".json") and Path(word).is_file()
