"""`lumen bench numerics`: measure every figure beside its published value, compare bits, fail where one is missed."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from lumen.bench.numerics.lines import Line, compared, measured, product_lines, show


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="lumen bench numerics",
        description="Every figure of the number formats beside its published value and bound, and bit-equality with "
        "other packages. Exit status 1 where one is missed.",
    )
    parser.add_argument("--quick", action="store_true", help="smaller tensors: seconds instead of minutes")
    parser.add_argument("--json", metavar="FILE", help="write the lines to a file too")
    arguments = parser.parse_args(argv)

    from lumen.bench.numerics import gemms
    from lumen.bench.numerics.equality import comparisons
    from lumen.bench.numerics.figures import FULL, QUICK, figures

    start = time.monotonic()
    lines: list[Line] = []
    for figure in figures(QUICK if arguments.quick else FULL):
        lines.append(measured(figure))
        show(lines)
    for recipe in gemms.ready():
        for line in product_lines(recipe, gemms.QUICK_LENGTHS if arguments.quick else gemms.LENGTHS):
            lines.append(line)
            show(lines)
    for comparison in comparisons():
        lines.append(compared(comparison))
        show(lines)
    failed = [line for line in lines if line.ok is False]
    skipped = sum(line.ok is None for line in lines)
    print(
        f"\n{len(lines)} lines: {len(lines) - len(failed) - skipped} hold, {len(failed)} missed, {skipped} not run; "
        f"{time.monotonic() - start:.0f} s"
    )
    for line in failed:
        print(f"  missed: {line.table}: {line.name}: {line.got} where {line.want} is due")
    if arguments.json:
        from lumen.core.files import atomic_write_json

        atomic_write_json(Path(arguments.json), [line.to_dict() for line in lines])
    return 1 if failed else 0
