"""`lumen kernels`: the table of kernels, and which one a chip would get."""

from __future__ import annotations

import argparse
import json
from typing import Any


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="lumen kernels", description="The table of kernels, and which would be chosen."
    )
    parser.add_argument(
        "--target", default="", help="an architecture: cpu, gfx942, sm_90 (default: the first GPU, or cpu)"
    )
    parser.add_argument("--json", action="store_true", help="for a machine to read")
    arguments = parser.parse_args(argv)

    import torch

    from lumen.core.errors import QuantError
    from lumen.hardware import architecture
    from lumen.kernels import select, table, target_of

    target = arguments.target.lower().partition(":")[0]
    if not target:
        target = target_of("cuda" if torch.cuda.is_available() else "cpu")
    elif target != "cpu":
        target = architecture(target).name
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
        print(json.dumps({"target": target, "kernels": rows}, indent=2))
        return 0
    print(f"kernels on {target} (* is chosen)\n")
    print(f"  {'operation':<14}{'format':<8}{'backend':<11}{'kind':<10}targets")
    for row in rows:
        mark = "*" if row["chosen"] else " "
        print(
            f"{mark} {row['op']:<14}{row['format']:<8}{row['backend']:<11}{row['kind']:<10}{' '.join(row['targets'])}"
        )
        print(f"    {row['why']}" + (f"; here: {row['missing']}" if row["missing"] else ""))
    return 0
