"""Tables on standard output: for a terminal of any width, with or without colour."""

from __future__ import annotations

import os
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lumen.eval.report import EvalReport


def output() -> Console:
    """Standard output: rich finds colour and width of a terminal; elsewhere it is plain and 100 columns wide."""
    console = Console(highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = 100
    return console


def grid(rows: Sequence[Sequence[str]], *, title: str = "", right: bool = False, lines: bool = False) -> Table:
    """A table whose first row is its header.

    right: figures in all columns but the first are set to the right.  lines: a line between rows (long cells).
    """
    head, *body = rows
    table = Table(
        box=box.ROUNDED if lines else box.SIMPLE_HEAD, title=title or None, title_justify="left", show_lines=lines
    )
    for i, name in enumerate(head):
        table.add_column(Text(name), justify="right" if right and i else "left", overflow="fold")
    for row in body:
        table.add_row(*map(Text, row))
    return table


def show_report(report: EvalReport, console: Console) -> None:
    """Figures, then the answers side by side."""
    console.print(f"{report.rows} held-out rows of {report.data}, recipe {report.recipe}, {report.dtype}", markup=False)
    for model in report.models:
        console.print(f"{model.label}: {model.name}", markup=False)
    if report.models:
        console.print(grid([report.headers, *report.table()], right=True))
        by_label = {model.label: model for model in report.models}
        if {"base", "tuned"} <= by_label.keys():
            before, after = by_label["base"].loss, by_label["tuned"].loss
            change = f"{(after - before) / before:+.1%}" if before else ""
            console.print(f"held-out loss {before:.4f} before training, {after:.4f} after ({change})")
    if report.samples:
        labels = list(report.samples[0].answers)
        rows = [
            [_prompt(sample.system, sample.prompt), *(sample.answers[label] for label in labels), sample.reference]
            for sample in report.samples
        ]
        console.print(grid([["prompt", *labels, "the data's answer"], *rows], lines=True))


def _prompt(system: str, prompt: str) -> str:
    return f"[{system}]\n{prompt}" if system else prompt
