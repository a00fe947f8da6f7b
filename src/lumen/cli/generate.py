"""`lumen generate`: answer the prompts of a file."""

from __future__ import annotations

import sys

USAGE = """usage: lumen generate --model MODEL --prompts FILE [--out FILE.jsonl] [--adapter DIR] [key=value ...]
       lumen generate FILE.yaml --prompts FILE ...

Answer every prompt of a file (.txt: one a line; .json, .jsonl, .csv, .parquet: a text, `prompt`, `messages`,
`conversations` or alpaca's columns) and write one JSON object a line. A last assistant turn, or alpaca's `output`, is
kept as the reference and not shown to the model.

  --model MODEL        directory, hub id, .gguf file or an adapter's folder (model_name_or_path)
  --adapter DIR        an adapter on top of it (adapter_name_or_path)
  --prompts FILE       the prompts
  --out FILE.jsonl     where the answers go; default: standard output
  --batch-size N       prompts that run together; default 8
  --limit N            only the first N prompts
  --greedy             always the likeliest token
  --allow-remote-code  run code that the model ships
  key=value            any key: temperature=0.7 max_new_tokens=200 template=qwen3 seed=1
"""


def main(argv: list[str]) -> int:
    from lumen.cli.arguments import load_for_answers, split_for_answers, take, whole_number

    rest = list(argv)
    given: dict[str, str] = {}
    for option in ("--prompts", "--out", "--batch-size", "--limit"):
        found, rest = take(rest, option)
        given |= {option: found[-1]} if found else {}
    arguments = split_for_answers(rest)
    if arguments.help or not argv:
        print(USAGE, end="", file=sys.stdout if arguments.help else sys.stderr)
        return 0 if arguments.help else 2
    from lumen.core import ConfigError

    if "--prompts" not in given:
        raise ConfigError("no prompts were given", where="command line", fix="--prompts FILE")
    loaded = load_for_answers(arguments, fix="--model MODEL")
    from lumen.generate.file import answer_file

    answer_file(
        loaded.run,
        given["--prompts"],
        given.get("--out"),
        batch_size=whole_number(given.get("--batch-size", "8"), "--batch-size"),
        limit=whole_number(given["--limit"], "--limit") if "--limit" in given else None,
    )
    return 0
