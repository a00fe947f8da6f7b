"""`lumen eval MODEL|RUN|FILE`: held-out loss, perplexity, token accuracy, and answers before and after training."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

EPILOG = """\
examples:
  lumen eval runs/first                              a run: its base and what training made of it, on its held-out rows
  lumen eval runs/first --generate 8                 and the answers of both to 8 held-out prompts
  lumen eval MODEL --adapter DIR --data rows.jsonl   a model with an adapter, on other rows
  lumen eval run.yaml                                what a configuration names (also LLaMA-Factory's, do_eval)
  lumen eval MODEL --data rows.jsonl quant=int8      a model under a recipe

Any key of a configuration overrides: cutoff_len=1024, per_device_eval_batch_size=4, do_sample=true, quant=bf16.
Answers are greedy and at most 128 tokens long unless a sampling key says otherwise.
"""


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="lumen eval",
        description="Held-out loss, perplexity and token accuracy; answers side by side.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("target", metavar="MODEL|RUN|FILE", help="a model, a run's output_dir, or a configuration")
    parser.add_argument("--adapter", action="append", default=[], metavar="DIR", help="adapter to put on the model")
    parser.add_argument("--data", metavar="FILE", help="held-out rows: a file, or a name in dataset_info.json")
    parser.add_argument("--generate", type=int, default=0, metavar="N", help="answer the first N held-out prompts")
    parser.add_argument("--no-base", action="store_true", help="leave the model before training out")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument("--out", metavar="DIR", help="write eval.json and eval.html there; default for a run: RUN/eval")
    arguments, words = parser.parse_known_args(argv)

    from lumen.core import ConfigError
    from lumen.core.files import atomic_write_json, atomic_write_text
    from lumen.core.log import note, say

    if arguments.generate < 0:
        raise ConfigError("--generate must be 0 or more", where="--generate", fix="give a number of prompts")
    from lumen.eval.evaluate import evaluate
    from lumen.eval.show import output, show_report

    subject, notes = subject_of(arguments, words)
    for line in notes:
        note(line)
    report = evaluate(subject, generate=arguments.generate, base=not arguments.no_base, progress=say)
    if arguments.json:
        print(json.dumps(report.to_dict(), indent=2, ensure_ascii=False))
    else:
        show_report(report, output())
    out = arguments.out or (subject.tuned / "eval" if subject.tuned is not None else None)
    if out is not None:
        atomic_write_json(Path(out) / "eval.json", report.to_dict())
        atomic_write_text(Path(out) / "eval.html", report.page())
        say(f"written: {Path(out) / 'eval.json'}, {Path(out) / 'eval.html'}")
    return 0


def subject_of(arguments: argparse.Namespace, words: list[str]) -> tuple[Any, list[str]]:
    """What the command line names, as a `Subject`, with the notes of its configuration."""
    from lumen.config import load
    from lumen.eval.evaluate import with_data
    from lumen.eval.subject import Subject, check_tuned
    from lumen.trainer.config import RunConfig

    target = Path(arguments.target).expanduser()
    is_run = target.is_dir() and (target / "config.yaml").is_file() and (target / "metrics.jsonl").is_file()
    is_file = target.is_file() and target.suffix.lower() in (".yaml", ".yml", ".json")
    values: dict[str, Any] = {}
    if arguments.adapter:
        values["adapter_name_or_path"] = arguments.adapter
    if is_run:
        loaded = load(target / "config.yaml", words, values=values, needs=("model_name_or_path",))
    elif is_file:
        loaded = load(target, words, values=values, needs=("model_name_or_path",))
    else:
        base, is_adapter = _base_of(target)
        values["model_name_or_path"] = base if is_adapter else arguments.target
        if is_adapter:
            values["adapter_name_or_path"] = [str(target), *arguments.adapter]
        loaded = load(None, words, values=values)
    config: RunConfig = loaded.run
    update: dict[str, Any] = {}
    # a resolved configuration has every key, so only the words of this command line count as choices in a run
    named = {word.lstrip("-").partition("=")[0].replace("-", "_") for word in words}
    chosen = named if is_run else named | loaded.given
    if not chosen & {"do_sample", "temperature", "top_p", "top_k"}:
        update["do_sample"] = False
    if "max_new_tokens" not in chosen:
        update["max_new_tokens"] = 128
    if arguments.data and "max_samples" not in named:
        update["max_samples"] = None
    config = config.model_copy(update=update)
    if arguments.data:
        config = with_data(config, [arguments.data])
    tuned = check_tuned(target) if is_run and not arguments.adapter else None
    return Subject(config, tuned, trained=is_run or is_file), loaded.notes


def _base_of(target: Path) -> tuple[str, bool]:
    """The base that an adapter's directory names, and whether `target` is such a directory."""
    if not (target / "adapter_config.json").is_file() or (target / "config.json").is_file():
        return os.fspath(target), False
    from lumen.adapters.load import adapter_base
    from lumen.core import ModelError

    base = adapter_base(target)
    if not base:
        raise ModelError(
            f"{target} names no base model",
            where=str(target / "adapter_config.json"),
            fix=f"give it: lumen eval MODEL --adapter {target}",
        )
    return base, True
