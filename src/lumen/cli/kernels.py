"""`lumen kernels`: the table of kernels, which one a chip would get, and how each recipe would run on it."""

from __future__ import annotations

import argparse
import json
from typing import Any


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="lumen kernels", description="The table of kernels, and which would be chosen."
    )
    parser.add_argument(
        "--target", default="", help="a chip: MI300X, gfx942, sm_90, cpu (default: the first GPU, or cpu)"
    )
    parser.add_argument("--json", action="store_true", help="for a machine to read")
    arguments = parser.parse_args(argv)

    import torch

    from lumen.core.errors import QuantError
    from lumen.kernels import select, table
    from lumen.quant.report import recipe_rows
    from lumen.quant.target import resolve

    target = resolve(arguments.target, "cuda" if torch.cuda.is_available() else "cpu")
    recipes = {"trained": recipe_rows(target, frozen=False), "frozen": recipe_rows(target, frozen=True)}
    rows: list[dict[str, Any]] = []
    for kernel in table():
        for fmt in kernel.formats:
            try:
                chosen = select(kernel.op, target, fmt) is kernel
            except QuantError:
                chosen = False
            rows.append(
                {
                    "op": kernel.op,
                    "format": fmt,
                    "backend": kernel.backend,
                    "targets": list(kernel.targets),
                    "kind": kernel.kind,
                    "chosen": chosen,
                    "missing": kernel.missing() if kernel.fits(target, fmt) else f"not for {target}",
                    "why": kernel.why,
                }
            )
    if arguments.json:
        print(json.dumps({"target": target, "kernels": rows, "recipes": recipes}, indent=2))
        return 0
    print(f"kernels on {target} (* is chosen)\n")
    print(f"  {'operation':<14}{'format':<8}{'backend':<11}{'kind':<10}targets")
    for row in rows:
        mark = "*" if row["chosen"] else " "
        print(
            f"{mark} {row['op']:<14}{row['format']:<8}{row['backend']:<11}{row['kind']:<10}{' '.join(row['targets'])}"
        )
        print(f"    {row['why']}" + (f"; here: {row['missing']}" if row["missing"] else ""))
    print("\n".join(recipe_lines(target, recipes)))
    return 0


def recipe_lines(target: str, recipes: dict[str, list[dict[str, str]]]) -> list[str]:
    """How every recipe's products run on the chip, trained and frozen, and why where that is not plain."""
    columns = ("forward", "dgrad", "wgrad")
    reasons: dict[str, str] = {}
    lines = ["", f"recipes on {target}, as `quantize(..., target={target!r})` would report them"]
    for state, rows in recipes.items():
        shown = columns if state == "trained" else columns[:2]
        lines += ["", f"  {state + ' weight':<20}" + "".join(f"{gemm:<13}" for gemm in shown) + "stored"]
        for row in rows:
            if row["missing"]:
                lines.append(f"  {row['recipe']:<20}not in this version: {row['missing']}")
                continue
            lines.append(f"  {row['recipe']:<20}" + "".join(f"{row[g]:<13}" for g in shown) + row["stored"])
            reasons |= {row[f"{g} why"]: row[g] for g in shown if row[g] != "none"}
    lines.append("")
    return lines + [f"  {kind:<13}{why}" for why, kind in sorted(reasons.items(), key=lambda item: item[::-1])]
