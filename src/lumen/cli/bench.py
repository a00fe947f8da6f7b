"""`lumen bench NAME`: one measurement of the bench room."""

from __future__ import annotations

import sys
from difflib import get_close_matches
from importlib import import_module

from lumen.bench import BENCHES


def main(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print(usage())
        return 0 if argv else 2
    name, rest = argv[0], argv[1:]
    if name not in BENCHES:
        close = get_close_matches(name, BENCHES, n=1)
        hint = f"did you mean `{close[0]}`?" if close else "`lumen bench --help` lists them"
        print(f"there is no bench `{name}`; {hint}", file=sys.stderr)
        return 2
    return int(import_module(f"lumen.bench.{name.replace('-', '_')}.command").main(rest))


def usage() -> str:
    width = max(map(len, BENCHES))
    return "\n".join(
        [
            "usage: lumen bench NAME [options]     `lumen bench NAME --help` explains one",
            "",
            *(f"  {name:<{width}}  {line}" for name, line in BENCHES.items()),
        ]
    )
