"""Documentation that stays true: links, make targets, commands, paths and configurations in every Markdown file.

For each tracked `.md` file:

* relative links lead to a file, and their `#anchor` to a heading there;
* `make TARGET` is a target of the Makefile;
* `lumen VERB` (and `python -m lumen VERB`) is a verb that is built, and each `--option` written with it is known there;
* a path of this repository in backticks exists;
* a `yaml` block that names a model is a configuration that `lumen config validate` accepts.

Prints what is wrong as file:line and exits with 1.  `make docs-check` runs it, and CI does.
"""

from __future__ import annotations

import contextlib
import io
import re
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)|!\[[^\]]*\]\(([^)\s]+)\)")
MAKE = re.compile(r"(?:^\s*|[;&|(]\s*|[$]\s)make ([a-z][a-z0-9-]*)\b")
COMMAND = re.compile(r"(?:^|[$\s(])(?:\S*bin/|python -m )?lumen ([a-z]+)\b([^|#\n]*)")
PLACE = re.compile(r"`((?:src|scripts|bench|tests|docs|recipes|examples|\.ci)/[\w./-]+)`")
FENCE = re.compile(r"^(`{3,})(\w*)")


def tracked(root: Path) -> list[Path]:
    """All Markdown files under version control."""
    listed = subprocess.run(["git", "ls-files", "*.md"], cwd=root, capture_output=True, text=True, check=True)
    return [root / name for name in listed.stdout.splitlines()]


def targets(root: Path) -> set[str]:
    """The Makefile's targets."""
    return set(re.findall(r"^([a-z][a-z0-9-]*):", (root / "Makefile").read_text(), re.MULTILINE))


def anchors(path: Path) -> set[str]:
    """Anchors of a file's headings, as code hosts make them."""
    found = set()
    for heading in re.findall(r"^#+ (.+)$", path.read_text(), re.MULTILINE):
        plain = re.sub(r"[^\w\- ]", "", heading.strip().lower())
        found.add(plain.replace(" ", "-"))
    return found


@cache
def help_of(verb: str) -> str | None:
    """The help text of a verb; None where it is not built."""
    from lumen.cli.main import built_verbs, run

    if verb not in built_verbs():
        return None
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text), contextlib.suppress(SystemExit):
        run([verb, "--help"])
    return text.getvalue()


def check_command(verb: str, rest: str) -> str | None:
    """What is wrong with `lumen verb rest`, or None.

    An option that the help does not list may still be a configuration key (`--learning_rate`).
    """
    text = help_of(verb)
    if text is None:
        return f"`lumen {verb}` is not built"
    for option in re.findall(r"(?<![\w-])--([a-z][\w-]*)", rest):
        if f"--{option}" not in text and option not in configuration_keys():
            subverb = re.match(r"\s+([a-z][a-z-]*)", rest)
            if subverb and f"--{option}" in (sub_help(verb, subverb[1]) or ""):
                continue
            return f"`lumen {verb}` has no option --{option}"
    return None


@cache
def sub_help(verb: str, sub: str) -> str | None:
    """Help of `lumen verb sub`."""
    from lumen.cli.main import run

    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text), contextlib.suppress(SystemExit):
        run([verb, sub, "--help"])
    return text.getvalue()


@cache
def configuration_keys() -> frozenset[str]:
    """Names of all configuration keys, own and foreign."""
    from lumen.config import RENAMED, FileConfig, foreign_keys

    return frozenset(FileConfig.model_fields) | frozenset(RENAMED) | frozenset(foreign_keys())


def check_yaml(text: str) -> str | None:
    """What `lumen config validate` says against a block, or None; blocks that name no model are not run files."""
    if not re.search(r"^model_name_or_path:", text, re.MULTILINE):
        return None
    from lumen.config import load
    from lumen.core.errors import LumenError

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.yaml"
        path.write_text(text)
        try:
            with contextlib.redirect_stderr(io.StringIO()):
                load(str(path), [])
        except LumenError as error:
            return str(error).replace("\n", " ")
    return None


def blocks(lines: list[str]) -> list[tuple[int, str, str]]:
    """Fenced blocks as (line number of the first line inside, language, text)."""
    found, start, language, fence = [], 0, "", ""
    for number, line in enumerate(lines, 1):
        match = FENCE.match(line.strip())
        if not fence and match:
            start, language, fence = number + 1, match[2], match[1]
        elif fence and line.strip() == fence:
            found.append((start, language, "\n".join(lines[start - 1 : number - 1])))
            fence = ""
    return found


def check_file(path: Path, root: Path, known_targets: set[str]) -> list[str]:
    """Everything that is wrong in one file, as `file:line: what`."""
    text = path.read_text()
    lines = text.splitlines()
    wrong: list[tuple[int, str]] = []
    fenced = {start + i for start, _, block in blocks(lines) for i in range(len(block.splitlines()))}
    for number, line in enumerate(lines, 1):
        for pair in LINK.findall(line) if number not in fenced else []:
            link = pair[0] or pair[1]
            if re.match(r"[a-z]+:", link):
                continue
            name, _, anchor = link.partition("#")
            target = (path.parent / name).resolve() if name else path
            if not target.exists():
                wrong.append((number, f"link to {link}: there is no such file"))
            elif anchor and target.suffix == ".md" and anchor not in anchors(target):
                wrong.append((number, f"link to {link}: there is no such heading"))
        for code in [line] if number in fenced else re.findall(r"`([^`]+)`", line):
            wrong += [
                (number, f"`make {name}` is not a target") for name in MAKE.findall(code) if name not in known_targets
            ]
            problems = (check_command(verb, rest) for verb, rest in COMMAND.findall(code))
            wrong += [(number, problem) for problem in problems if problem]
        for place in PLACE.findall(line):
            if "..." not in place and not (root / place).exists() and not (root / "src/lumen" / place).exists():
                wrong.append((number, f"`{place}` does not exist"))
    for start, language, block in blocks(lines):
        if language in ("yaml", "yml") and (problem := check_yaml(block)):
            wrong.append((start, f"configuration: {problem}"))
    return [f"{path.relative_to(root)}:{number}: {what}" for number, what in wrong]


def main() -> None:
    known = targets(ROOT)
    files = tracked(ROOT)
    wrong = [line for path in files for line in check_file(path, ROOT, known)]
    print("\n".join(wrong) if wrong else f"docs: {len(files)} files, nothing wrong")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
