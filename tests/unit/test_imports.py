"""The house keeps its order: imports point from a later room to an earlier one, never back, and never in a circle."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SRC = Path(__file__).parents[2] / "src" / "lumen"

ROOMS = [
    "core",
    "hardware",
    "formats",
    "isa",
    "kernels",
    "quant",
    "optim",
    "models",
    "adapters",
    "data",
    "memory",
    "distributed",
    "checkpoint",
    "monitor",
    "objectives",
    "generate",
    "planner",
    "trainer",
    "eval",
    "export",
    "serve",
    "doctor",
    "bench",
    "config",
    "ui",
    "cli",
]


def room_of(path: Path) -> str:
    return path.relative_to(SRC).parts[0]


def imported_modules(tree: ast.AST) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide the direction"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


FILES = sorted(p for p in SRC.rglob("*.py") if p.parent != SRC)


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SRC)))
def test_imports_point_downward(path: Path) -> None:
    own = ROOMS.index(room_of(path))
    for module in imported_modules(ast.parse(path.read_text())):
        parts = module.split(".")
        if parts[0] != "lumen":
            continue
        assert len(parts) > 1 and parts[1] in ROOMS, f"{path.name}: import rooms, not the package root ({module})"
        assert ROOMS.index(parts[1]) <= own, f"{path.relative_to(SRC)} imports upward: {module}"


def test_every_room_is_there() -> None:
    folders = {p.name for p in SRC.iterdir() if p.is_dir() and p.name != "__pycache__"}
    assert folders == set(ROOMS)
    for room in ROOMS:
        assert (SRC / room / "README.md").read_text().strip(), f"{room} has no README"


def test_no_cycles_within_a_room() -> None:
    """A depth-first walk over module-level imports finds no way back."""
    names = {".".join(("lumen", *p.relative_to(SRC).with_suffix("").parts)).removesuffix(".__init__"): p for p in FILES}
    graph: dict[str, set[str]] = {}
    for name, path in names.items():
        top = ast.Module(
            [n for n in ast.parse(path.read_text()).body if isinstance(n, ast.Import | ast.ImportFrom)], []
        )
        edges = set()
        for module in imported_modules(top):
            target = module if module in names else module.rpartition(".")[0]
            if target in names and target != name and not name.startswith(target + "."):
                edges.add(target)
        graph[name] = edges
    done: set[str] = set()

    def walk(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, " -> ".join((*trail[trail.index(name) :], name))
        if name not in done:
            for target in graph[name]:
                walk(target, (*trail, name))
            done.add(name)

    for name in graph:
        walk(name, ())


def test_files_stay_short() -> None:
    for path in SRC.rglob("*.py"):
        assert len(path.read_text().splitlines()) <= 450, f"{path.relative_to(SRC)} is too long"


def test_import_lumen_touches_nothing_heavy() -> None:
    """`import lumen` starts no GPU and imports no optional or heavy package."""
    code = (
        "import sys, lumen; "
        "heavy = {'triton', 'bitsandbytes', 'flash_attn', 'transformers', 'peft', 'matplotlib', 'tensorboard'}; "
        "bad = heavy & set(sys.modules); "
        "assert not bad, bad; "
        "torch = sys.modules.get('torch'); "
        "assert torch is None or not torch.cuda.is_initialized()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=SRC.parent)
