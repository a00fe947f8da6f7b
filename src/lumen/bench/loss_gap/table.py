"""From cells to the table: paired gaps, their interval, the difference to the independent implementation, verdicts."""

from __future__ import annotations

import random
from dataclasses import dataclass
from statistics import median
from typing import Any

from lumen.bench.loss_gap import cells
from lumen.bench.loss_gap.cases import BASELINE, LIMITS, YARDSTICK, Case
from lumen.bench.loss_gap.cells import Cell, Results

_DRAWS = 2000


@dataclass
class Row:
    """One case on one base; gaps in per cent of bf16's held-out loss.  None: not measured.

    interval: 95 % by bootstrap, over seeds where there are three, over held-out rows where there is one.
    high: ours, evaluated in bf16.  away: ours minus independent, in points.
    """

    base: str
    case: str
    rows: int
    seeds: int
    done: int
    independent_done: int = 0
    ours: float | None = None
    interval: tuple[float, float] | None = None
    independent: float | None = None
    high: float | None = None
    operands: dict[str, Any] | None = None
    same_order: bool = True

    @property
    def away(self) -> float | None:
        return None if self.ours is None or self.independent is None else self.ours - self.independent

    @property
    def complete(self) -> bool:
        """Whether every seed of both implementations has run: before that nothing can hold."""
        return self.done == self.independent_done == self.seeds

    @property
    def failures(self) -> list[str]:
        """What of the issue's bounds does not hold."""
        found = []
        if not self.same_order:
            found.append("rows in another order than bf16's")
        if self.away is not None and self.away > YARDSTICK:
            found.append(f"{self.away:.2f} points worse than the independent implementation")
        limit = LIMITS.get(self.case) if self.base == "B" else None
        if limit is not None and self.ours is not None and self.ours > limit:
            found.append(f"loses more than {limit} %")
        return found


def row(results: Results, base: str, case: Case) -> Row:
    """The table's row from the cells that are there."""
    rows, seeds = cells.plan(results, base, case.name)
    kinds: dict[str, list[tuple[dict[str, Any], dict[str, Any]]]] = {"ours": [], "independent": []}
    for seed in range(seeds):
        reference = results.get(Cell(base, BASELINE, BASELINE, seed, rows))
        for kind, pairs in kinds.items():
            found = results.get(Cell(base, case.name, kind, seed, rows))
            if found is not None and reference is not None and found["base"] == reference["base"]:
                pairs.append((found, reference))
    made = Row(base, case.name, rows, seeds, len(kinds["ours"]), len(kinds["independent"]))
    made.operands = results.get(Cell(base, case.name, "operands"))
    ours, theirs = kinds["ours"], kinds["independent"]
    made.same_order = all(found["order"] == reference["order"] for found, reference in ours + theirs)
    if ours:
        made.ours, made.interval = median(_gap(f, r) for f, r in ours), _interval(ours)
        made.high = median(_gap(f, r, "high") for f, r in ours)
    if theirs:
        made.independent = median(_gap(f, r) for f, r in theirs)
    return made


def _mean(result: dict[str, Any], which: list[int] | None = None) -> float:
    chosen = range(len(result["loss"])) if which is None else which
    total = sum(result["tokens"][i] for i in chosen)
    return sum(float(result["loss"][i]) for i in chosen) / total


def _gap(
    found: dict[str, Any], reference: dict[str, Any], kind: str = "quantised", which: list[int] | None = None
) -> float:
    return 100 * (_mean(found[kind], which) / _mean(reference["quantised"], which) - 1)


def _interval(pairs: list[tuple[dict[str, Any], dict[str, Any]]]) -> tuple[float, float]:
    draw = random.Random(0)
    values = []
    if len(pairs) > 1:
        gaps = [_gap(f, r) for f, r in pairs]
        values = [median(draw.choices(gaps, k=len(gaps))) for _ in range(_DRAWS)]
    else:
        found, reference = pairs[0]
        count = range(len(found["quantised"]["loss"]))
        values = [_gap(found, reference, which=draw.choices(count, k=len(count))) for _ in range(_DRAWS)]
    values.sort()
    return values[int(0.025 * _DRAWS)], values[int(0.975 * _DRAWS) - 1]


_HEAD = (
    "| case | rows × seeds | gap, % | 95 % | independent, % | ours − independent | bf16 evaluation, % | operands | |\n"
    "| --- | --- | --- | --- | --- | --- | --- | --- | --- |"
)


def markdown(results: Results, bases: list[str], ready: list[Case], missing: dict[str, str]) -> str:
    """The whole table, one section per base, then what is missing."""
    parts = []
    for base in bases:
        parts += [f"### Base {base}", "", _HEAD]
        parts += [_line(row(results, base, case)) for case in ready]
        parts.append("")
    if missing:
        parts.append(
            "Not available in this version: " + "; ".join(f"`{n}` ({why})" for n, why in missing.items()) + "."
        )
    return "\n".join(parts).rstrip() + "\n"


def _line(r: Row) -> str:
    if r.ours is None:
        return f"| {r.case} | {r.rows} × {r.seeds} | not yet run | | | | | {_equality(r)} | |"
    low, high = r.interval or (0.0, 0.0)
    over = "seeds" if r.done > 1 else "rows"
    missing = "" if r.done == r.seeds else f" ({r.done} of {r.seeds} run)"
    verdict = "; ".join(r.failures) or ("holds" if r.complete else "incomplete")
    return (
        f"| {r.case} | {r.rows} × {r.seeds}{missing} | {r.ours:+.2f} | {low:+.2f} … {high:+.2f} ({over}) "
        f"| {_number(r.independent)} | {_number(r.away)} | {_number(r.high)} | {_equality(r)} | {verdict} |"
    )


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:+.2f}"


def _equality(r: Row) -> str:
    found = r.operands
    if found is None:
        return "not compared"
    if not found["comparable"]:
        return str(found["why"])
    equal, count = found["operands"]
    if found["equal"]:
        return f"bit-equal ({count})"
    where = ", ".join(sorted(found["unequal"])) or f"products differ in {100 * found['difference']:.1f} % of a result"
    return f"{equal} of {count}: {where}"
