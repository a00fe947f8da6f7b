"""Cells: what the table consists of, which of them are done, and the running of the next.

Every cell is one file with one line of JSON, so a table that was interrupted goes on where it stopped, and two
processes may share the work.  A cell whose base or settings have changed counts as not done.

Operands first: where the operands of three training steps are bit-equal to the independent implementation's, one seed
(and on A fewer rows) is enough to see that nothing else differs; otherwise three seeds and all rows.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from lumen.bench.loss_gap import independent, operands, train
from lumen.bench.loss_gap.bases import SETTINGS, SHORT_ROWS, Base, Settings
from lumen.bench.loss_gap.cases import BASELINE, THREE_SEEDS_ON_B, Case
from lumen.core.files import atomic_write_text

SEEDS = 3
_FIRST = ("int8", "fp8-blockwise", "mxfp8", "mxfp4", "nf4", "fp8", "int8-backward", "fp8-rowwise")
"""Measured before the rest, so that an interrupted table holds what matters most."""


@dataclass(frozen=True)
class Cell:
    """One run, or one comparison of operands.  implementation: bf16, ours, independent, or `operands`."""

    base: str
    case: str
    implementation: str
    seed: int = 0
    rows: int = 0

    @property
    def file(self) -> str:
        name = self.case.replace(" ", "_")
        if self.implementation == "operands":
            return f"{self.base}_{name}_operands.json"
        return f"{self.base}_{name}_{self.implementation}_{self.rows}rows_seed{self.seed}.json"


class Results:
    """The folder of cells.

    bases: name → the base as it is now; only results of the same base and settings count.  None: whatever is stored
    counts, to show it without having the base (a row still compares only cells of one base).
    """

    def __init__(self, folder: Path, bases: dict[str, Callable[[], Base]] | None) -> None:
        self.folder, self._makers, self._bases = folder, bases, dict[str, Base]()

    def settings(self, name: str) -> Settings:
        return SETTINGS[name] if self._makers is None else self.base(name).settings

    def base(self, name: str) -> Base:
        assert self._makers is not None
        if name not in self._bases:
            self._bases[name] = self._makers[name]()
        return self._bases[name]

    def stored(self, cell: Cell) -> dict[str, Any] | None:
        """The cell's result whatever base it was measured on, or None."""
        path = self.folder / cell.file
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None

    def get(self, cell: Cell) -> dict[str, Any] | None:
        """The cell's result, None where it is not there or belongs to another base or other settings."""
        found = self.stored(cell)
        if found is None or self._makers is None or found["base"] == self._identity(cell.base):
            return found
        return None

    def _identity(self, name: str) -> dict[str, Any]:
        base = self.base(name)
        return {"fingerprint": base.fingerprint, **asdict(base.settings)}

    def run(self, cell: Cell, case: Case | None) -> dict[str, Any]:
        """Measure a cell and write it."""
        base = self.base(cell.base)
        if cell.implementation == "operands":
            assert case is not None
            result = operands.compare(base, case)
        else:
            result = train.run(base, case, cell.implementation, seed=cell.seed, rows=cell.rows)
        record = {
            "cell": asdict(cell), "base": self._identity(cell.base), **result, "machine": machine(),
        }  # fmt: skip
        atomic_write_text(self.folder / cell.file, json.dumps(record) + "\n")
        return record


def wanted(results: Results, base: str, cases: list[Case]) -> Iterator[tuple[str, Cell]]:
    """(case, cell) for every cell of one base, in the order in which they are best measured.

    How many rows and seeds a case takes is read from its operands when its turn comes.
    """
    ranked = sorted(cases, key=lambda c: _FIRST.index(c.name) if c.name in _FIRST else len(_FIRST))
    for case in ranked:
        check = Cell(base, case.name, "operands")
        yield case.name, check
        rows, seeds = plan(results, base, case.name)
        for seed in range(seeds):
            yield case.name, Cell(base, BASELINE, BASELINE, seed, rows)
            yield case.name, Cell(base, case.name, "ours", seed, rows)
            if independent.has_scheme(case.name):
                yield case.name, Cell(base, case.name, "independent", seed, rows)


def plan(results: Results, base: str, case: str) -> tuple[int, int]:
    """(rows, seeds) of a case: fewer where its operands are known to be bit-equal."""
    found = results.get(Cell(base, case, "operands"))
    equal = bool(found and found["equal"])
    full = results.settings(base).rows
    rows = min(full, SHORT_ROWS.get(base, full)) if equal else full
    seeds = 1 if equal and not (base == "B" and case in THREE_SEEDS_ON_B) else SEEDS
    return rows, seeds


def outstanding(
    results: Results, bases: list[str], cases: list[Case], share: tuple[int, int] = (1, 1)
) -> Iterator[tuple[str, Cell]]:
    """(case, cell) for what is not done, one by one as it becomes known.

    share (i, n): the i-th of n processes' part, chosen by case, so that whoever needs a case's operands compares them.
    """
    part, parts = share
    for base in bases:
        mine = [c for i, c in enumerate(cases) if i % parts == part - 1]
        for case, cell in wanted(results, base, mine):
            if results.get(cell) is None:
                yield case, cell


def machine() -> dict[str, Any]:
    """What the cell was measured on."""
    import transformers

    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [
            line.partition(":")[2].strip() for line in info.read_text().splitlines() if line.startswith("model name")
        ]
        name = names[0] if names else name
    return {
        "cpu": name, "cores": os.cpu_count(), "threads": torch.get_num_threads(),
        "torch": torch.__version__, "transformers": transformers.__version__,
    }  # fmt: skip
