"""`lumen compare RUN …`: runs side by side, as a table, JSON or Markdown, with their loss curves in one picture."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="lumen compare",
        description="Put runs side by side: method, trainable share, memory, speed, held-out loss, and what was set "
        "differently. Loads no model.",
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="output_dir of a `lumen train`")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="everything as JSON, curves included")
    form.add_argument("--markdown", action="store_true", help="the tables in Markdown")
    parser.add_argument("--plot", metavar="FILE", help="PNG of the curves; default: compare.png beside the first run")
    parser.add_argument("--no-plot", action="store_true", help="draw nothing")
    arguments = parser.parse_args(argv)

    from lumen.eval.compare import as_json, cautions, differences, markdown, names, table
    from lumen.eval.runs import read_run

    runs = [read_run(Path(name)) for name in arguments.runs]
    picture = _draw(arguments, runs)
    if arguments.json:
        print(json.dumps({**as_json(runs), "plot": picture}, indent=2, ensure_ascii=False))
        return 0
    rows, settings = table(runs), differences(runs)
    if arguments.markdown:
        print(markdown(rows))
        if settings:
            print("\n" + markdown([["setting", *names(runs)], *settings]))
    else:
        from lumen.eval.show import grid, output

        console = output()
        console.print(grid(rows, right=True))
        if settings:
            console.print(grid([["set differently", *names(runs)], *settings], right=True))
    for line in cautions(runs):
        print(f"caution: {line}", file=sys.stderr)
    if picture:
        print(f"curves: {picture}", file=sys.stderr)
    return 0


def _draw(arguments: argparse.Namespace, runs: list) -> str | None:
    if arguments.no_plot:
        return None
    from lumen.core.log import warn
    from lumen.eval.overlay import overlay

    path = Path(arguments.plot) if arguments.plot else runs[0].path.parent / "compare.png"
    try:
        return str(path) if overlay(runs, path) else None
    except (OSError, ValueError, ImportError) as error:
        warn(f"the curves could not be drawn: {error}")
        return None
