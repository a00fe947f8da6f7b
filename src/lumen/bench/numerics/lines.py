"""Lines of the report: what was wanted, what was measured, whether it holds."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from lumen.bench.numerics.equality import Comparison, version
from lumen.bench.numerics.figures import Figure
from lumen.bench.numerics.gemms import ALLOWED, products
from lumen.quant.policy import GEMMS


@dataclass(frozen=True)
class Line:
    """want, got: as printed.  ok: None where it was not measured here, and `note` says why."""

    table: str
    name: str
    want: str
    got: str
    ok: bool | None
    value: float | None = None
    note: str = ""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def measured(figure: Figure) -> Line:
    """Measure one figure."""
    got = float(figure.measure())
    number = _number(figure.unit)
    want = f"{number(figure.want)} ± {figure.bound:g}" if figure.kind == "near" else f"{figure.kind} {figure.want:g}"
    return Line(figure.table, figure.name, want, number(got), figure.holds(got), got)


def compared(comparison: Comparison) -> Line:
    """Run one comparison with another package."""
    installed = version(comparison.package)
    table = f"bit-equality with {comparison.package} {installed}".rstrip()
    if not installed:
        note = f"not installed: pip install --no-deps {comparison.package}"
        return Line(table, comparison.name, "0 differ", "", None, note=note)
    unequal, number = comparison.run()
    return Line(table, comparison.name, "0 differ", f"{unequal} of {number}", unequal == 0, unequal)


def product_lines(recipe: str, lengths: tuple[int, ...]) -> list[Line]:
    """One line per GEMM of a recipe: how far its worst product lies from its bound."""
    lines = []
    found = list(products(recipe, lengths))
    for gemm in GEMMS:
        own = [p for p in found if p.gemm == gemm]
        if own:
            worst = min(own, key=lambda p: p.margin)
            note = (
                f"worst of {len(own)}: {worst.sqnr:.1f} dB at {worst.length}, {'frozen' if worst.frozen else 'trained'}"
                f"{', outliers' if worst.outliers else ''}"
            )
            lines.append(
                Line(
                    "SQNR of GEMMs against fp64, less -10·log10(NSR_a + NSR_b)", f"{recipe} {gemm}",
                    f"at least {ALLOWED:g} dB", f"{worst.margin:+.2f} dB", worst.margin >= ALLOWED, worst.margin, note,
                )
            )  # fmt: skip
    return lines


def show(lines: list[Line]) -> None:
    """Print the newest line, under its table's name where a table begins."""
    line = lines[-1]
    if len(lines) == 1 or lines[-2].table != line.table:
        print(f"\n{line.table}")
    verdict = "not run" if line.ok is None else "ok" if line.ok else "MISSED"
    note = f"  {line.note}" if line.note else ""
    print(f"  {line.name:<58} {line.got:>12}   want {line.want:<18} {verdict}{note}", flush=True)


def _number(unit: str) -> Any:
    return (lambda v: f"{v:.2f} {unit}") if unit else (lambda v: f"{v:.5g}")
