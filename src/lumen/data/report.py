"""What became of every row: the counts add up, and whatever was left out is listed with its place and reason."""

from __future__ import annotations

import dataclasses
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lumen.core.files import atomic_write_json, atomic_write_text
from lumen.data.rows import dump_row

LISTED = 20
"""Places shown for each reason; the counts are always whole."""


@dataclass
class Rejected:
    """A row left out. place: file:line or file, row n. row: what it held, for the reject file."""

    place: str
    reason: str
    row: Any = None


@dataclass
class DatasetReport:
    """One dataset: rows == kept + len(dropped) + len(rejected) always holds.

    rows:       rows taken from its files (after max_samples and num_samples).
    kept:       rows that are trained on.
    examples:   token rows they became; more than `kept` where a template needs several renderings of a row.
    dropped:    rows with nothing to learn.
    rejected:   rows that could not be read (`on_bad_rows: skip`).
    truncated:  examples cut to cutoff_len.
    unanswered: rows whose last turns nobody answers; those turns were left out.
    """

    name: str
    rows: int = 0
    kept: int = 0
    examples: int = 0
    truncated: int = 0
    unanswered: int = 0
    tokens: int = 0
    loss_tokens: int = 0
    cached: bool = False
    fingerprint: str = ""
    dropped: list[Rejected] = field(default_factory=list)
    rejected: list[Rejected] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> DatasetReport:
        values = dict(values)
        for name in ("dropped", "rejected"):
            values[name] = [Rejected(**item) for item in values[name]]
        return cls(**values)


@dataclass
class DataReport:
    """All datasets of a run. `train` and `eval` are numbers of examples after mixing and splitting."""

    datasets: list[DatasetReport] = field(default_factory=list)
    train: int = 0
    eval: dict[str, int] = field(default_factory=dict)
    packing: dict[str, float] = field(default_factory=dict)
    template: str = ""

    @property
    def dropped(self) -> list[Rejected]:
        return [item for dataset in self.datasets for item in dataset.dropped]

    @property
    def rejected(self) -> list[Rejected]:
        return [item for dataset in self.datasets for item in dataset.rejected]

    def lines(self) -> list[str]:
        """What a person reads: one line a dataset, then every reason with its count and first places."""
        lines = []
        for d in self.datasets:
            parts = [f"{d.name}: {d.rows} rows, {d.kept} kept"]
            if d.examples != d.kept:
                parts.append(f"{d.examples} examples")
            for count, what in ((len(d.dropped), "dropped"), (len(d.rejected), "rejected"), (d.truncated, "truncated"),
                                (d.unanswered, "with turns nobody answers left out")):  # fmt: skip
                if count:
                    parts.append(f"{count} {what}")
            share = d.loss_tokens / d.tokens if d.tokens else 0.0
            parts.append(f"{d.tokens} tokens, {share:.1%} learned")
            lines.append(", ".join(parts) + (" (cached)" if d.cached else ""))
        if self.packing:
            full = self.packing["efficiency"]
            lines.append(f"packing: {self.train} examples in {self.packing['rows']:.0f} rows, {full:.1%} full")
        for title, items in (("dropped", self.dropped), ("rejected", self.rejected)):
            for reason, count in Counter(item.reason for item in items).most_common():
                places = [item.place for item in items if item.reason == reason]
                more = f" and {count - 5} more" if count > 5 else ""
                lines.append(f"  {title}: {reason} ({count}): {'; '.join(places[:5])}{more}")
        return lines

    def to_dict(self) -> dict[str, Any]:
        values = dataclasses.asdict(self)
        for dataset in values["datasets"]:
            for name in ("dropped", "rejected"):
                items = dataset[name]
                dataset[name] = {
                    "count": len(items),
                    "reasons": dict(Counter(item["reason"] for item in items)),
                    "places": [f"{item['place']}: {item['reason']}" for item in items[:LISTED]],
                }
        return values

    def write(self, directory: Path) -> None:
        """`data_report.json`, and `rejects.jsonl` with every row that was left out, if any."""
        atomic_write_json(directory / "data_report.json", self.to_dict())
        items = [("rejected", item) for item in self.rejected] + [("dropped", item) for item in self.dropped]
        if items:
            rows = [{"place": i.place, "why": why, "reason": i.reason, "row": i.row} for why, i in items]
            atomic_write_text(directory / "rejects.jsonl", "".join(dump_row(row) + "\n" for row in rows))
