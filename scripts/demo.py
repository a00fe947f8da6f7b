"""`make demo`: a small real model learns four greeting styles, and you see it before and after.

    answers before → lumen train examples/greetings/demo.yaml → answers after, styles matched, loss, where things lie

It asks no network: the sample model came with `make setup`.  Exit status 0 where the training succeeded, the
held-out loss fell and at least three of the four styles are matched after it, else 1.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
GREETINGS = ROOT / "examples" / "greetings"
RUN = ROOT / "demo-run"
CONFIG = "examples/greetings/demo.yaml"
MATCHES = 0.7
"""A style is matched when at least this share of its held-out answers fits its expression."""

ENOUGH = 3
"""Styles that must be matched after training for the demo to succeed."""

LONGEST = 128
"""Tokens of an answer at most: the longest of the training rows has 93, and an answer may be longer than its like."""

QUIET = {
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_VERBOSITY": "error",
    "TQDM_DISABLE": "1",  # transformers' bars of unpacking the weights; the training has its own
    "GOMP_SPINCOUNT": "1000",
    "MPLBACKEND": "Agg",
}


class Styles:
    """The styles of styles.json and which held-out rows belong to which."""

    def __init__(self, folder: Path = GREETINGS):
        self.table: dict[str, Any] = json.loads((folder / "styles.json").read_text(encoding="utf-8"))
        lines = (folder / "heldout.jsonl").read_text(encoding="utf-8").splitlines()
        self.rows: list[dict[str, Any]] = [json.loads(line) for line in lines]

    def fits(self, row: dict[str, Any], answer: str) -> bool:
        """Whether an answer fits the expression of its row's style and language."""
        return re.search(self.table[row["style"]]["regex"][row["language"]], answer.strip()) is not None

    def score(self, answers: Sequence[str]) -> dict[str, tuple[int, int]]:
        """Style → (answers that fit, answers), for one answer to each held-out row in order."""
        score = dict.fromkeys(self.table, (0, 0))
        for row, answer in zip(self.rows, answers, strict=True):
            fit, count = score[row["style"]]
            score[row["style"]] = (fit + self.fits(row, answer), count + 1)
        return score

    def shown(self) -> list[int]:
        """Rows to show: the first of each style in each language."""
        seen: dict[tuple[str, str], int] = {}
        for number, row in enumerate(self.rows):
            seen.setdefault((row["style"], row["language"]), number)
        return sorted(seen.values(), key=lambda n: (list(self.table).index(self.rows[n]["style"]), n))


def matched(score: dict[str, tuple[int, int]]) -> int:
    """How many styles are matched."""
    return sum(fit >= MATCHES * count for fit, count in score.values())


def sparkline(values: Sequence[float], width: int = 60) -> str:
    """A curve as one line of text; long ones are averaged into `width` places."""
    if not values:
        return ""
    places = min(width, len(values))
    edges = [round(i * len(values) / places) for i in range(places + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    low, high = min(means), max(means)
    bars = "▁▂▃▄▅▆▇█"
    return "".join(bars[round((mean - low) / ((high - low) or 1.0) * (len(bars) - 1))] for mean in means)


def short(text: str, limit: int = 150) -> str:
    """An answer on few lines, for a table."""
    lines = re.sub(r"\n\s*\n+", "\n", text.strip()).split("\n")
    text = "\n".join(lines[:4]) + ("…" if len(lines) > 4 else "")
    return text if len(text) <= limit else text[: limit - 1] + "…"


def answers(adapter: Path | None, progress: Any) -> list[str]:
    """The model's greedy answers to the held-out prompts, with or without the trained adapter."""
    from lumen.config import load
    from lumen.eval.evaluate import evaluate
    from lumen.eval.subject import Subject

    # as `lumen chat` will run it: plain bf16, the recipe is for training
    words = ["quant=bf16", "do_sample=false", f"max_new_tokens={LONGEST}", f"dataset_dir={GREETINGS}"]
    subject = Subject(load(GREETINGS / "demo.yaml", words).run, adapter, trained=True)
    report = evaluate(subject, generate=10_000, base=False, loss=False, progress=progress)
    gc.collect()
    return [next(iter(sample.answers.values())) for sample in report.samples]


def train(run: Path, words: Sequence[str]) -> int:
    """`lumen train` in a process of its own, its progress bar on this terminal."""
    command = [sys.executable, "-m", "lumen", "train", CONFIG, f"output_dir={run}", *words]
    source = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]))
    return subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": source}, check=False).returncode


class Demo:
    """Prints the stages; every stage says how long it took."""

    def __init__(self) -> None:
        from rich.console import Console

        width = None if sys.stdout.isatty() else 100
        self.console = Console(highlight=False, width=width)
        self.started = time.perf_counter()

    def say(self, line: str = "") -> None:
        self.console.print(line, markup=False)

    def stage(self, title: str) -> None:
        elapsed = time.perf_counter() - self.started
        self.console.print()
        self.console.rule(f"[bold]{title}[/bold]  [dim]{elapsed:.0f} s[/dim]", align="left", characters="─")

    def progress(self, line: str) -> None:
        self.console.print(f"… {line}", style="dim", markup=False)

    def table(self, rows: Sequence[Sequence[str]], *, lines: bool = False, ratios: Sequence[int] = ()) -> None:
        """First row: header.  ratios: shares of the width, for columns of long text."""
        from rich import box
        from rich.table import Table
        from rich.text import Text

        table = Table(box=box.ROUNDED if lines else box.SIMPLE_HEAD, show_lines=lines, expand=bool(ratios))
        for i, name in enumerate(rows[0]):
            table.add_column(Text(name), overflow="fold", ratio=ratios[i] if ratios else None)
        for row in rows[1:]:
            table.add_row(*map(Text, row))
        self.console.print(table)


def model_is_there(demo: Demo) -> bool:
    """Say which model is trained, or how to get it."""
    from lumen.core import LumenError
    from lumen.models.config import ModelConfig
    from lumen.models.source import resolve_source

    try:
        source = resolve_source(ModelConfig(model_name_or_path="smollm2"))
    except LumenError as error:
        demo.say(f"error: {error}")
        return False
    demo.say(f"model: SmolLM2-135M-Instruct (Apache-2.0), {Path(str(source)).name}")
    demo.say("data:  examples/greetings: 128 rows to train on, 32 held out; 4 styles, English and Chinese")
    return True


def show_before(demo: Demo, styles: Styles, before: Sequence[str]) -> None:
    rows = [["style", "held-out prompt", "answer before training"]]
    for number in styles.shown():
        row = styles.rows[number]
        rows.append([row["style"], row["messages"][1]["content"], short(before[number])])
    demo.table(rows, lines=True, ratios=(2, 4, 8))


def show_after(demo: Demo, styles: Styles, before: Sequence[str], after: Sequence[str]) -> None:
    rows = [["style", "held-out prompt", "before", "after", ""]]
    for number in styles.shown():
        row = styles.rows[number]
        mark = "✓" if styles.fits(row, after[number]) else "·"
        rows.append(
            [row["style"], row["messages"][1]["content"], short(before[number], 90), short(after[number]), mark]
        )
    demo.table(rows, lines=True, ratios=(3, 4, 5, 7, 1))


def show_scores(demo: Demo, styles: Styles, before: Sequence[str], after: Sequence[str]) -> tuple[int, int]:
    """The table of styles; returns how many are matched before and after."""
    first, last = styles.score(before), styles.score(after)
    rows = [["style", "before", "after", "matched", "what counts"]]
    for name, entry in styles.table.items():
        yes = "yes" if last[name][0] >= MATCHES * last[name][1] else "no"
        rows.append([name, "{}/{}".format(*first[name]), "{}/{}".format(*last[name]), yes, entry["what"]])
    demo.table(rows)
    return matched(first), matched(last)


def show_loss(demo: Demo, run: Path) -> bool:
    """Held-out loss before and after, the training curve as text; returns whether the held-out loss fell."""
    from lumen.eval.runs import read_run

    summary = read_run(run)
    losses = [loss for _, loss in summary.train_curve]
    if losses:
        demo.say(f"training loss  {losses[0]:.3f}  {sparkline(losses)}  {losses[-1]:.3f}")
    for step, loss in summary.held_out_curve:
        demo.say(f"held-out loss  {loss:.4f}  " + ("before training" if step == 0 else f"after step {step}"))
    if summary.first is None or summary.final is None:
        demo.say("the held-out loss was not measured")
        return False
    return summary.final < summary.first


def show_end(demo: Demo, run: Path) -> None:
    shown = os.path.relpath(run, ROOT)
    lumen = os.path.relpath(Path(sys.executable).parent / "lumen", ROOT)
    lumen = lumen if not lumen.startswith("..") else "lumen"
    demo.table(
        [
            ["file", "what"],
            [
                f"{shown}/adapter_model.safetensors",
                "the adapter (PEFT's format), with tokenizer and template beside it",
            ],
            [f"{shown}/README.md", "its card: data, settings, results"],
            [f"{shown}/loss.png", "the loss curves"],
            [f"{shown}/metrics.jsonl", "every figure of every step"],
            [f"{shown}/answers.json", "all 32 answers before and after"],
            [f"{shown}/config.yaml, run.json", "the resolved configuration; versions and hardware"],
        ]
    )
    demo.say("next, from the checkout:")
    for line, what in (
        (f"{lumen} chat {shown} --system 'Greeting style: cheerful'", "talk to it"),
        (f"{lumen} eval {shown} --generate 8", "loss and answers"),
        (f"{lumen} merge --adapter {shown} --out runs/greetings", "one model of both"),
        (f"{lumen} data inspect {CONFIG}", "rows as the model sees them"),
    ):
        demo.say(f"  {line:<67} {what}")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Fine-tune a small real model on the bundled greetings.")
    parser.add_argument("words", nargs="*", metavar="key=value", help="overrides for `lumen train`")
    parser.add_argument("--run", type=Path, default=RUN, help="folder of the run; it is replaced")
    arguments = parser.parse_args(argv)
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    sys.path.insert(0, str(ROOT / "src"))
    run = arguments.run.resolve()
    demo, styles = Demo(), Styles()

    demo.stage("Lumen: a model learns four greeting styles")
    if not model_is_there(demo):
        return 1
    demo.stage("1 of 3: before training")
    before = answers(None, demo.progress)
    show_before(demo, styles, before)

    demo.stage("2 of 3: training, GEMMs in int8 (lumen train " + CONFIG + ")")
    if (run / "metrics.jsonl").is_file():
        shutil.rmtree(run)  # an earlier demo's
    status = train(run, arguments.words)
    if status:
        demo.say(f"the training failed (exit status {status})")
        return 1

    demo.stage("3 of 3: after training")
    after = answers(run, demo.progress)
    show_after(demo, styles, before, after)
    first, last = show_scores(demo, styles, before, after)
    fell = show_loss(demo, run)
    record = [
        {"style": row["style"], "language": row["language"], "prompt": row["messages"][1]["content"], "before": b,
         "after": a, "fits": styles.fits(row, a)}
        for row, b, a in zip(styles.rows, before, after, strict=True)
    ]  # fmt: skip
    (run / "answers.json").write_text(json.dumps(record, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    show_end(demo, run)
    demo.say()
    demo.say(f"styles matched: {first} of {len(styles.table)} before, {last} of {len(styles.table)} after")
    if not fell:
        demo.say("FAILED: the held-out loss did not fall")
    if last < ENOUGH:
        demo.say(f"FAILED: {last} styles matched after training; the demo asks for at least {ENOUGH}")
    demo.say(f"total time: {time.perf_counter() - demo.started:.0f} s")
    return 0 if fell and last >= ENOUGH else 1


if __name__ == "__main__":
    sys.exit(main())
