"""What an evaluation found: figures of each model, answers side by side; as lines, as JSON, as a page."""

from __future__ import annotations

import html
import math
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass
class Measured:
    """Figures of one model on the held-out rows.

    label:      base, tuned, or model.  name: what was loaded.
    loss:       nats per labelled token.  accuracy: share of labelled tokens that were the likeliest, 0 to 1.
    tokens:     labelled tokens.  seconds: of the measurement.
    """

    label: str
    name: str
    loss: float
    perplexity: float
    accuracy: float
    tokens: int
    seconds: float


@dataclass
class Sample:
    """A held-out prompt, the data's own answer, and the answer of each model by label."""

    messages: list[dict[str, Any]]
    reference: str
    answers: dict[str, str]
    source: str = ""

    @property
    def prompt(self) -> str:
        """The last message before the answer."""
        return str(self.messages[-1].get("content") or "") if self.messages else ""

    @property
    def system(self) -> str:
        """The system message, or an empty text."""
        return next((str(m.get("content") or "") for m in self.messages if m.get("role") == "system"), "")


@dataclass
class EvalReport:
    """data: names of the held-out data.  rows: examples in it.  recipe, dtype: what was computed in."""

    data: str
    rows: int
    recipe: str
    dtype: str
    models: list[Measured] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON (an infinite perplexity is text, because JSON has none)."""
        values = asdict(self)
        for model in values["models"]:
            model.update({k: str(v) for k, v in model.items() if isinstance(v, float) and not math.isfinite(v)})
        return values

    @property
    def headers(self) -> list[str]:
        """Of `table`."""
        return ["", "held-out loss", "perplexity", "accuracy", "tokens", "seconds"]

    def table(self) -> list[list[str]]:
        """One row for each model."""
        return [
            [m.label, f"{m.loss:.4f}", f"{m.perplexity:.2f}", f"{m.accuracy:.1%}", f"{m.tokens:,}", f"{m.seconds:.1f}"]
            for m in self.models
        ]

    def page(self) -> str:
        """A self-contained HTML page."""
        figures = [[*row, model.name] for row, model in zip(self.table(), self.models, strict=True)]
        rows = "".join(f"<tr>{_cells(row)}</tr>" for row in figures)
        heads = "".join(f"<th>{html.escape(head)}</th>" for head in [*self.headers, "model"])
        labels = [model.label for model in self.models]
        shown = "".join(_sample(sample, labels) for sample in self.samples)
        answers = ""
        if self.samples:
            names = "".join(f"<th>{html.escape(label)}</th>" for label in labels)
            answers = (
                f"<h2>Answers to {len(self.samples)} held-out prompts</h2>"
                f"<table class=answers><tr><th>prompt</th>{names}<th>the data's answer</th></tr>{shown}</table>"
            )
        about = f"{self.rows} held-out rows of {self.data} · recipe {self.recipe} · {self.dtype}"
        return (
            f"<!doctype html><html><head><meta charset=utf-8><title>Evaluation</title><style>{_STYLE}</style></head>"
            f"<body><h1>Evaluation</h1><p>{html.escape(about)}</p>"
            f"<table><tr>{heads}</tr>{rows}</table>{answers}</body></html>\n"
        )


_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:80rem;padding:0 1rem;color:#222}"
    "table{border-collapse:collapse;margin:1rem 0}td,th{border:1px solid #d5d9de;padding:.45rem .7rem;text-align:left;"
    "vertical-align:top}th{background:#f3f5f7}.answers{width:100%;table-layout:fixed}"
    ".answers td{white-space:pre-wrap;overflow-wrap:anywhere}small{color:#6a7078;display:block}"
)


def _cells(row: list[str]) -> str:
    return "".join(f"<td>{html.escape(cell)}</td>" for cell in row)


def _sample(sample: Sample, labels: list[str]) -> str:
    system = f"<small>{html.escape(sample.system)}</small>" if sample.system else ""
    answers = _cells([sample.answers.get(label, "") for label in labels])
    return f"<tr><td>{system}{html.escape(sample.prompt)}</td>{answers}{_cells([sample.reference])}</tr>"
