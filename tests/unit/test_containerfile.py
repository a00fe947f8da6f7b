"""Containerfile by parsing, and the page's flags against what the doctor recommends on containers."""

from __future__ import annotations

import json
import re
from pathlib import Path

from tests.helpers.recorded import findings

ROOT = Path(__file__).parents[2]
KNOWN = {"ARG", "FROM", "WORKDIR", "COPY", "RUN", "ENV", "ENTRYPOINT", "CMD", "LABEL", "USER", "VOLUME", "EXPOSE"}


def instructions() -> list[tuple[str, str]]:
    """(instruction, its arguments) with continuation lines joined and comments removed."""
    lines = [line for line in (ROOT / "Containerfile").read_text().splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n", " ", "\n".join(lines))
    return [
        (word, rest.strip()) for word, _, rest in (line.partition(" ") for line in joined.splitlines() if line.strip())
    ]


def test_every_instruction_is_one_and_the_base_comes_first() -> None:
    found = instructions()
    assert {word for word, _ in found} <= KNOWN
    assert [word for word, _ in found][:2] == ["ARG", "FROM"]
    assert found[0][1].startswith("BASE=docker.io/rocm/pytorch:") and found[1][1] == "${BASE}"


def test_what_is_copied_exists_and_is_enough_to_install() -> None:
    copied = [name for word, rest in instructions() if word == "COPY" for name in rest.split()[:-1]]
    assert all((ROOT / name).exists() for name in copied)
    project = (ROOT / "pyproject.toml").read_text()
    needed = {re.search(r'readme = "(.*)"', project)[1], *re.findall(r'license-files = \["(.*)"\]', project)}  # type: ignore[index]
    assert needed | {"pyproject.toml", "src"} <= set(copied)


def test_the_images_torch_stays() -> None:
    (run,) = [rest for word, rest in instructions() if word == "RUN"]
    assert "--constraint constraints.txt" in run and run.count("assert torch.version.hip") == 2
    assert not re.search(r"pip install[^&]*\btorch\b", run)
    for code in re.findall(r'python3 -c "(.*?)"(?= )', run):
        compile(code, "Containerfile", "exec")


def test_it_starts_the_doctor() -> None:
    values = dict(instructions())
    assert json.loads(values["ENTRYPOINT"]) == ["lumen"] and json.loads(values["CMD"]) == ["doctor"]


def test_the_page_names_the_flags_that_the_doctor_recommends() -> None:
    page = (ROOT / "docs" / "containers.md").read_text(encoding="utf-8")
    for name in ("container-without-groups", "container-without-devices", "container-small-shm"):
        assert name in page
        fixes = " ".join(f.fix for f in findings(name)[1])
        for flag in re.findall(r"--(?:device|ipc|group-add|shm-size)\b(?:=/dev/\w+|=host)?", fixes):
            assert flag in page, f"{name}: {flag}"
    command = page.partition("docker run")[2].partition("```")[0]
    assert all(flag in command for flag in ("--device=/dev/kfd", "--device=/dev/dri", "--group-add", "--ipc=host"))
