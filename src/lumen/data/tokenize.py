"""One dataset's rows → tokens: read, convert, render, tokenise, cut.

Every row ends up in exactly one of three places: kept, dropped (nothing to learn) or rejected (cannot be read); the
report's counts prove it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from lumen.core import DataError
from lumen.data.config import DataConfig
from lumen.data.conversation import NothingToLearn, RowError
from lumen.data.examples import Table
from lumen.data.info import DatasetSpec
from lumen.data.readers import BadRow, Row, read_rows
from lumen.data.render import ChatRenderer, Rendering, encode_plain, encode_renderings
from lumen.data.report import DatasetReport, Rejected
from lumen.data.rows import text_of, to_conversation
from lumen.data.truncate import cut

Item = tuple[np.ndarray, np.ndarray, int, int]

CHUNK = 1000
"""Rows tokenised at a time: enough to fill the tokenizer's threads, little enough to hold."""


@dataclass
class Taken:
    """The rows taken of a dataset, with the number of each one's file."""

    spec: DatasetSpec
    files: list[Path]
    rows: list[tuple[int, Row | BadRow]] = field(default_factory=list)

    def place(self, file: int, row: Row | BadRow) -> str:
        name = str(self.files[file])
        return f"{name}:{row.line}" if row.line is not None else f"{name}, row {row.number}"


def take(spec: DatasetSpec, config: DataConfig) -> Taken:
    """Read a dataset's rows, at most `max_samples` and `num_samples` of them, the first ones."""
    limits = [n for n in (config.max_samples, spec.num_samples) if n is not None]
    limit = min(limits) if limits else None
    taken = Taken(spec, list(spec.files))
    for file, path in enumerate(spec.files):
        for row in read_rows(path, config.encoding):
            if limit is not None and len(taken.rows) >= limit:
                break
            if isinstance(row, Row) and not taken.spec.formatting:
                taken.spec = taken.spec.told_by(row.value)
            taken.rows.append((file, row))
    return taken


def tokenize(taken: Taken, config: DataConfig, tokenizer: Any, stage: str) -> tuple[Table, DatasetReport]:
    """The table of a dataset and the report of its rows.

    Raises DataError for the first bad row unless `on_bad_rows: skip`, and where no row is left.
    """
    report = DatasetReport(taken.spec.name, rows=len(taken.rows))
    if taken.spec.ranking and stage == "sft":
        raise DataError(
            "these are preference rows (chosen and rejected), which stage sft does not train on",
            where=taken.spec.name,
            fix="preference tuning is not part of this version; use rows with one answer",
        )
    items: list[Item] = []
    for start in range(0, len(taken.rows), CHUNK):
        items += _chunk(taken, taken.rows[start : start + CHUNK], config, tokenizer, stage, report)
    report.examples = len(items)
    if not items:
        raise _nothing_left(report, config)
    kinds = ["row" if all(r.line is None for f, r in taken.rows if f == n) else "line" for n in range(len(taken.files))]
    table = Table.from_examples(items, {"files": [[str(p), k] for p, k in zip(taken.files, kinds, strict=True)]})
    report.tokens, report.loss_tokens = len(table.ids), int(table.learned.sum())
    report.fingerprint = table.fingerprint
    return table, report


def _chunk(
    taken: Taken,
    rows: list[tuple[int, Row | BadRow]],
    config: DataConfig,
    tokenizer: Any,
    stage: str,
    report: DatasetReport,
) -> Iterator[Item]:
    renderer = None
    if stage == "sft":
        renderer = ChatRenderer(
            tokenizer,
            enable_thinking=config.enable_thinking,
            default_system=config.default_system,
            mask_history=config.mask_history,
        )
    prepared: list[tuple[int, Row, Any, list[Rendering]]] = []
    for file, row in rows:
        place = taken.place(file, row)
        if isinstance(row, BadRow):
            _bad(report, config, place, row.number, row.reason, row.text, row.fix)
            continue
        try:
            if renderer is None:
                tools, renderings = None, [Rendering(text_of(row.value, taken.spec), [], [])]
            else:
                conversation = to_conversation(row.value, taken.spec)
                report.unanswered += conversation.unanswered > 0
                tools, renderings = conversation.tools, renderer.render(conversation)
            prepared.append((file, row, tools, renderings))
        except NothingToLearn as error:
            report.dropped.append(Rejected(place, str(error), row.value))
        except RowError as error:
            _bad(report, config, place, row.number, error.what, row.value, error.fix)
    flat = [rendering for _, _, _, renderings in prepared for rendering in renderings]
    if renderer is None:
        texts = encode_plain(tokenizer, [rendering.text for rendering in flat])
        encoded = iter([(ids, np.ones(len(ids), bool)) for ids in texts])
    else:
        encoded = iter(encode_renderings(tokenizer, flat))
    for file, row, tools, renderings in prepared:
        number = row.line if row.line is not None else row.number
        examples: list[Item] = []
        for rendering in renderings:
            ids, learned = next(encoded)
            if renderer is None:
                examples += [(piece, np.ones(len(piece), bool), file, number) for piece in _pieces(ids, config)]
                continue
            if len(ids) > config.cutoff_len:
                ids, learned = cut(ids, learned, rendering, renderer, tools, config.cutoff_len)
                report.truncated += 1
            learned = learned.copy()
            learned[:1] = False
            if learned.any():
                learned[1:] |= config.train_on_prompt
                examples.append((ids, learned, file, number))
        if examples:
            report.kept += 1
            yield from examples
        else:
            reason = f"nothing of the answer is left within cutoff_len {config.cutoff_len}"
            report.dropped.append(Rejected(taken.place(file, row), reason, row.value))


def _pieces(ids: np.ndarray, config: DataConfig) -> list[np.ndarray]:
    """A document in pieces of at most cutoff_len tokens; none of a single token, which would teach nothing."""
    cuts = list(range(config.cutoff_len, len(ids), config.cutoff_len))
    if cuts and len(ids) - cuts[-1] == 1:
        cuts[-1] -= 1
    return [piece for piece in np.split(ids, cuts) if len(piece) > 1]


def _bad(report: DatasetReport, config: DataConfig, place: str, number: int, reason: str, row: Any, fix: str) -> None:
    if config.on_bad_rows == "raise":
        raise DataError(
            f"row {number}, {reason}" if reason.startswith("field ") else f"row {number}: {reason}",
            where=place,
            fix=fix or "correct the row, or set `on_bad_rows: skip` to leave such rows out and list them",
        )
    report.rejected.append(Rejected(place, reason, row))


def _nothing_left(report: DatasetReport, config: DataConfig) -> DataError:
    reasons = {item.reason: item.place for item in report.dropped + report.rejected}
    shown = "; ".join(f"{reason} (first: {place})" for reason, place in list(reasons.items())[:4])
    fix = "raise cutoff_len" if any("cutoff_len" in reason for reason in reasons) else "correct the rows"
    return DataError(
        f"no row is left to train on: {report.rows} rows, {len(report.dropped)} with nothing to learn, "
        f"{len(report.rejected)} that cannot be read. {shown}",
        where=report.name,
        fix=fix,
    )
