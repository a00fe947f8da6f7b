"""`lumen bench loss-gap`: run what the table still lacks, and print it."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from lumen.core import ConfigError, say

MORE = 3
"""Exit status where `--limit` or `--minutes` ended the work."""


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="lumen bench loss-gap",
        description="What each recipe costs in held-out loss against bf16, beside an independent implementation.",
    )
    data = "folder with alpaca_en_demo.json and wiki_demo.txt (default: $LUMEN_SHARED_DATA)"
    parser.add_argument("--data", type=Path, default=os.environ.get("LUMEN_SHARED_DATA"), help=data)
    parser.add_argument("--out", type=Path, default=Path("bench/results/loss_gap"), help="folder of the results")
    parser.add_argument("--cache", type=Path, default=None, help="where base B is kept (default: Lumen's cache)")
    parser.add_argument("--base", default="B,A", help="bases, in order (default: B,A)")
    parser.add_argument("--case", default="", help="cases, comma-separated (default: all)")
    parser.add_argument("--limit", type=int, default=None, help="stop after so many cases that had to be run")
    parser.add_argument("--minutes", type=float, default=None, help="start no cell after so many minutes")
    parser.add_argument("--share", default="1/1", help="i/n: the i-th of n processes that share the table")
    parser.add_argument("--table", action="store_true", help="only print the table of what is there, on whatever base")
    parser.add_argument("--quiet", action="store_true", help="only run; print no table")
    parser.add_argument("--redo", action="store_true", help="measure the chosen cases again")
    options = parser.parse_args(argv)

    import torch

    from lumen.bench.loss_gap import bases, cells, table
    from lumen.bench.loss_gap.cases import case as case_of
    from lumen.bench.loss_gap.cases import cases

    torch.set_num_threads(1)  # sums of one order: the same digits on every machine with this processor
    if options.data is None and not options.table:
        raise ConfigError("where is the data?", where="--data", fix="a folder with alpaca_en_demo.json, wiki_demo.txt")
    ready, missing = cases()
    if options.case:
        ready = [case_of(name.strip()) for name in options.case.split(",")]
    names = [name.strip() for name in options.base.split(",")]
    for name in names:
        if name not in bases.SETTINGS:
            raise ConfigError(f"there is no base {name!r}", where="--base", fix="A, B")
    makers: dict[str, Callable[[], bases.Base]] | None = None
    if not options.table:
        cache = options.cache or _cache()
        makers = {name: partial(bases.load_base, name, Path(options.data), cache) for name in names}
    results = cells.Results(options.out, makers)
    if not options.table:
        if options.redo:
            for cell in [c for n in names for _, c in cells.wanted(results, n, ready) if c.implementation != "bf16"]:
                (options.out / cell.file).unlink(missing_ok=True)
        start, by_name = time.monotonic(), {c.name: c for c in ready}
        touched: list[tuple[str, str]] = []
        for case_name, cell in cells.outstanding(results, names, ready, _share(options.share)):
            if (cell.base, case_name) not in touched:
                touched.append((cell.base, case_name))
            if options.limit is not None and len(touched) > options.limit:
                return MORE
            if options.minutes is not None and time.monotonic() - start > 60 * options.minutes:
                return MORE
            record = results.run(cell, by_name.get(cell.case))
            say(f"{cell.file}: {_brief(record)}")
    if options.quiet:
        return 0
    print(table.markdown(results, names, ready, missing))
    failed = [(r, r.failures) for n in names for c in ready if (r := table.row(results, n, c)).failures]
    for r, why in failed:
        print(f"does not hold: {r.case} on {r.base}: {'; '.join(why)}")
    return 1 if failed else 0


def _cache() -> Path:
    if root := os.environ.get("LUMEN_CACHE"):
        return Path(root) / "loss_gap"
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "lumen" / "loss_gap"


def _share(text: str) -> tuple[int, int]:
    part, _, parts = text.partition("/")
    if not (part.isdigit() and parts.isdigit() and 1 <= int(part) <= int(parts)):
        raise ConfigError(f"{text!r} is no share", where="--share", fix="1/2 and 2/2 for two processes")
    return int(part), int(parts)


def _brief(record: dict[str, object]) -> str:
    if "quantised" not in record:
        keys = ("comparable", "equal", "operands", "unequal", "products", "difference", "why")
        return ", ".join(f"{k} {record[k]}" for k in keys if k in record)
    held = record["quantised"]
    assert isinstance(held, dict)
    return f"held-out loss {sum(held['loss']) / sum(held['tokens']):.4f}, {record['seconds']} s"
