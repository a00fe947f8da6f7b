"""A content-addressed cache of tokenised datasets.

The key is a digest of everything that decides the tokens: the files' bytes, which rows are taken, how they are read,
the chat template's text, the tokenizer, the limits and masks, and the version of this code.  A changed argument is
another key, so a stale cache cannot be met; an unchanged one is mapped into memory instead of tokenised again.
An entry is written aside and takes its name in one rename, so two runs may write the same one and a crash leaves none.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from lumen.core import note
from lumen.core.files import atomic_directory, sha256_file, sha256_json
from lumen.data.config import DataConfig
from lumen.data.examples import Table
from lumen.data.info import DatasetSpec
from lumen.data.report import DatasetReport

VERSION = 3
"""Raised with every change that makes other tokens or masks of the same input."""

KEYED = (
    "cutoff_len",
    "max_samples",
    "train_on_prompt",
    "mask_history",
    "enable_thinking",
    "default_system",
    "encoding",
)
"""Fields of DataConfig that decide tokens; the template is in the tokenizer's fingerprint."""


def cache_root(config: DataConfig) -> Path:
    """`tokenized_path`; else $LUMEN_CACHE/data, $XDG_CACHE_HOME/lumen/data or ~/.cache/lumen/data."""
    if config.tokenized_path:
        return Path(config.tokenized_path).expanduser()
    if root := os.environ.get("LUMEN_CACHE"):
        return Path(root) / "data"
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "lumen" / "data"


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """Digest of vocabulary, merges, added tokens, special tokens and chat template."""
    import tokenizers
    import transformers

    backend = getattr(tokenizer, "backend_tokenizer", None)
    body = backend.to_str() if backend is not None else sorted(tokenizer.get_vocab().items())
    return sha256_json(
        {
            "class": type(tokenizer).__name__,
            "body": body,
            "added": {str(i): str(t) for i, t in sorted(getattr(tokenizer, "added_tokens_decoder", {}).items())},
            "special": {name: str(token) for name, token in tokenizer.special_tokens_map.items()},
            "template": getattr(tokenizer, "chat_template", None),
            "versions": [tokenizers.__version__, transformers.__version__],
        }
    )


def cache_key(spec: DatasetSpec, config: DataConfig, tokenizer_print: str, stage: str) -> str:
    """The key of one dataset's tokens."""
    return sha256_json(
        {
            "version": VERSION,
            "files": [[str(path), sha256_file(path)] for path in spec.files],
            "spec": [spec.name, spec.formatting, spec.columns, spec.tags, spec.ranking, spec.num_samples],
            "tokenizer": tokenizer_print,
            "stage": stage,
            "config": {name: getattr(config, name) for name in KEYED},
        }
    )  # fmt: skip


def load(directory: Path, config: DataConfig) -> tuple[Table, DatasetReport] | None:
    """A cached dataset, or None where there is none or it is damaged (which is said).

    Bad rows that an earlier run skipped are bad rows still: with `on_bad_rows: raise` they are read again and raised.
    """
    if not (directory / "report.json").is_file():
        return None
    try:
        table = Table.load(directory)
        report = DatasetReport.from_dict(json.loads((directory / "report.json").read_text("utf-8")))
    except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
        note(f"the data cache {directory.name} is damaged and made again ({error})")
        return None
    report.cached = True
    return None if report.rejected and config.on_bad_rows == "raise" else (table, report)


def store(directory: Path, table: Table, report: DatasetReport) -> None:
    """Commit a dataset; a folder that cannot be written is noted, not fatal."""
    try:
        with atomic_directory(directory) as temporary:
            table.save(temporary)
            (temporary / "report.json").write_text(json.dumps(report.to_dict(), default=str), "utf-8")
    except OSError as error:
        if not (directory / "report.json").is_file():  # else another run has committed the same entry
            note(f"the data cache cannot be written ({error}); the rows are tokenised again next time")
