"""One dataset's rows → tokens: read, convert, render, tokenise, cut.

Every row ends up in exactly one of three places: kept, dropped (nothing to learn) or rejected (cannot be read); the
report's counts prove it.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np

from lumen.core import DataError
from lumen.data.config import DataConfig
from lumen.data.conversation import NothingToLearn, RowError
from lumen.data.examples import Table
from lumen.data.info import DatasetSpec
from lumen.data.lines import BadRow, Row, place
from lumen.data.readers import read_rows
from lumen.data.render import ChatRenderer, Rendering, encode_plain, encode_renderings
from lumen.data.report import DatasetReport, Rejected
from lumen.data.rows import text_of, to_conversation
from lumen.data.truncate import cut

Item = tuple[np.ndarray, np.ndarray, int, int, int]

CHUNK = 1000
"""Rows tokenised at a time: enough to fill the tokenizer's threads, little enough to hold."""


class Source:
    """The rows of a dataset, read as they are needed: at most `max_samples` and `num_samples`, the first ones.

    spec: its row format is known once the first good row is read.
    """

    def __init__(self, spec: DatasetSpec, config: DataConfig) -> None:
        self.spec = spec
        limits = [n for n in (config.max_samples, spec.num_samples) if n is not None]
        self.limit = min(limits) if limits else None
        self.encoding = config.encoding

    def rows(self) -> Iterator[tuple[int, Row | BadRow]]:
        """(number of its file, row) in order."""
        count = 0
        for file, path in enumerate(self.spec.files):
            for row in read_rows(path, self.encoding):
                if count == self.limit:
                    return
                count += 1
                if isinstance(row, Row) and not self.spec.formatting:
                    row = self._recognise(file, row)
                yield file, row

    def _recognise(self, file: int, row: Row) -> Row | BadRow:
        """Tell the row format by this row; a row that tells nothing is a bad one."""
        try:
            self.spec = self.spec.told_by(row.value)
        except DataError as error:
            return BadRow(row.number, row.line, error.what, row.value, error.fix)
        return row

    def chunks(self) -> Iterator[list[tuple[int, Row | BadRow]]]:
        """The rows, CHUNK at a time."""
        rows = self.rows()
        while chunk := list(islice(rows, CHUNK)):
            yield chunk

    def place(self, file: int, row: Row | BadRow) -> str:
        return place(self.spec.files[file], row.line, row.number)


def tokenize(spec: DatasetSpec, config: DataConfig, tokenizer: Any, stage: str) -> tuple[Table, DatasetReport]:
    """The table of a dataset and the report of its rows.

    Raises DataError for the first bad row unless `on_bad_rows: skip`, and where no row is left.
    """
    source = Source(spec, config)
    report = DatasetReport(spec.name)
    items: list[Item] = []
    for chunk in source.chunks():
        report.rows += len(chunk)
        if source.spec.ranking and stage == "sft":
            raise DataError(
                "these are preference rows (chosen and rejected), which stage sft does not train on",
                where=spec.name,
                fix="preference tuning is not part of this version; use rows with one answer",
            )
        items += _chunk(source, chunk, config, tokenizer, stage, report)
    report.examples = len(items)
    if not items:
        raise _nothing_left(report, config)
    table = Table.from_examples(items, {"files": [str(path) for path in spec.files]})
    report.tokens, report.loss_tokens = len(table.ids), int(table.learned.sum())
    report.fingerprint = table.fingerprint
    return table, report


def _chunk(
    source: Source,
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
        where_from = source.place(file, row)
        if isinstance(row, BadRow):
            _bad(report, config, where_from, row.number, row.reason, row.held, row.fix)
            continue
        try:
            if renderer is None:
                tools, renderings = None, [Rendering(text_of(row.value, source.spec), [], [])]
            else:
                conversation = to_conversation(row.value, source.spec)
                report.unanswered += conversation.unanswered > 0
                tools, renderings = conversation.tools, renderer.render(conversation)
            prepared.append((file, row, tools, renderings))
        except NothingToLearn as error:
            report.dropped.append(Rejected(where_from, str(error), row.value))
        except RowError as error:
            _bad(report, config, where_from, row.number, error.what, row.value, error.fix)
    flat = [rendering for _, _, _, renderings in prepared for rendering in renderings]
    if renderer is None:
        texts = encode_plain(tokenizer, [rendering.text for rendering in flat])
        encoded = iter([(ids, np.ones(len(ids), bool)) for ids in texts])
    else:
        encoded = iter(encode_renderings(tokenizer, flat))
    for file, row, tools, renderings in prepared:
        where = (file, row.line or 0, row.number)
        examples: list[Item] = []
        for rendering in renderings:
            ids, learned = next(encoded)
            if renderer is None:
                examples += [(piece, np.ones(len(piece), bool), *where) for piece in _pieces(ids, config)]
                continue
            if len(ids) > config.cutoff_len:
                ids, learned = cut(ids, learned, rendering, renderer, tools, config.cutoff_len)
                report.truncated += 1
            learned = learned.copy()
            learned[:1] = False
            if learned.any():
                learned[1:] |= config.train_on_prompt
                examples.append((ids, learned, *where))
        if examples:
            report.kept += 1
            yield from examples
        else:
            reason = f"nothing of the answer is left within cutoff_len {config.cutoff_len}"
            report.dropped.append(Rejected(source.place(file, row), reason, row.value))


def _pieces(ids: np.ndarray, config: DataConfig) -> list[np.ndarray]:
    """A document in pieces of at most cutoff_len tokens; none of a single token, which would teach nothing."""
    cuts = list(range(config.cutoff_len, len(ids), config.cutoff_len))
    if cuts and len(ids) - cuts[-1] == 1:
        cuts[-1] -= 1
    return [piece for piece in np.split(ids, cuts) if len(piece) > 1]


def _bad(report: DatasetReport, config: DataConfig, where: str, number: int, reason: str, row: Any, fix: str) -> None:
    if config.on_bad_rows == "raise":
        raise DataError(
            f"row {number}, {reason}" if reason.startswith("field ") else f"row {number}: {reason}",
            where=where,
            fix=fix or "correct the row, or set `on_bad_rows: skip` to leave such rows out and list them",
        )
    report.rejected.append(Rejected(where, reason, row))


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
