"""`lumen data inspect`: rows as the model sees them."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

from lumen.core import ConfigError

CONFIG_SUFFIXES = (".yaml", ".yml")


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="lumen data", description="Look at data before training on it.")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="inspect")
    inspect = verbs.add_parser(
        "inspect",
        help="rows as the model sees them, with what is learned marked",
        description="Rows as the model sees them, what is learned of them, lengths, packing, and every row left out "
        "with its place and reason. Bad rows are listed, not raised. Exit status 1 where there are any.",
        epilog="More words are overrides of configuration keys: cutoff_len=512 template=chatml --max_samples 100",
    )
    inspect.add_argument("file", help="a configuration (.yaml), a data file, or the name of a dataset")
    inspect.add_argument("--rows", type=int, default=3, metavar="N", help="examples shown (default 3)")
    inspect.add_argument("--model", help="whose tokenizer: directory, hub id, GGUF, smollm2")
    inspect.add_argument("--tokens", action="store_true", help="show every token with its id and label")
    inspect.add_argument("--json", action="store_true", help="print figures and rows as JSON")
    arguments, overrides = parser.parse_known_args(argv)
    return _inspect(arguments, overrides)


def _inspect(arguments: argparse.Namespace, overrides: list[str]) -> int:
    from lumen.config import load
    from lumen.core import note
    from lumen.data.build import build_datasets
    from lumen.data.inspect import marked, pieces, summary, summary_lines, token_lines
    from lumen.models.source import resolve_source
    from lumen.models.tokenizer import load_tokenizer

    values: dict[str, Any] = {"on_bad_rows": "skip"}
    is_config = Path(arguments.file).suffix.lower() in CONFIG_SUFFIXES
    if not is_config:
        values["dataset"] = [arguments.file]
    if arguments.model:
        values["model_name_or_path"] = arguments.model
    loaded = load(arguments.file if is_config else None, overrides, values=values, needs=("dataset",))
    for line in loaded.notes:
        note(line)
    config = loaded.run
    if not config.model_name_or_path:
        raise ConfigError(
            "whose tokens? no model is named", where="--model", fix="add --model, for example --model smollm2"
        )
    tokenizer = load_tokenizer(resolve_source(config), config)
    seed = config.data_seed if config.data_seed is not None else config.seed
    data = build_datasets(config, tokenizer, seed=seed, stage=config.stage)
    figures = summary(data, config, batch_size=config.per_device_train_batch_size, seed=seed)
    shown = data.train[: max(arguments.rows, 0)]
    status = 1 if data.report.rejected else 0
    if arguments.json:
        figures["rows"] = [
            {
                "source": example.source,
                "pieces": [{"text": text, "learned": learned} for text, learned in pieces(example, tokenizer)],
                "input_ids": example.input_ids.tolist(),
                "labels": example.labels.tolist(),
            }
            for example in shown
        ]
        print(json.dumps(figures, indent=2, ensure_ascii=False))
        return status
    colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    for example in shown:
        learned = int((example.labels != -100).sum())
        print(f"── {example.source}: {len(example.input_ids)} tokens, {learned} learned")
        if arguments.tokens:
            print("\n".join(token_lines(example, tokenizer)))
        else:
            print(marked(example, tokenizer, colour=colour))
    if shown:
        print(f"── learned text is {'green' if colour else 'in ⟦ ⟧'}")
    print("\n".join(summary_lines(figures, config)))
    print("\n".join(data.report.lines()))
    return status
