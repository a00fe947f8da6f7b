"""Rows as the model sees them: what is learned of them, how long they are, what was left out."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np

from lumen.data.build import Datasets
from lumen.data.config import DataConfig
from lumen.data.examples import IGNORE, Example, ExampleStore
from lumen.data.loader import Loader, epoch_generator
from lumen.data.packing import efficiency, pack

OPEN, CLOSE = "⟦", "⟧"
"""Around learned text where there is no colour."""


def pieces(example: Example, tokenizer: Any) -> list[tuple[str, bool]]:
    """An example's text in stretches of (text, learned).

    Texts are decoded prefixes of the whole, so characters made of several tokens stay whole.
    """
    ids, learned = example.input_ids, example.labels != IGNORE
    edges = [0, *(np.flatnonzero(np.diff(learned.astype(np.int8))) + 1).tolist(), len(ids)]
    result = []
    for start, stop in pairwise(edges):
        text = tokenizer.decode(ids[start:stop].tolist(), clean_up_tokenization_spaces=False)
        result.append((text, bool(learned[start])))
    return result


def marked(example: Example, tokenizer: Any, *, colour: bool) -> str:
    """The text with what is learned in green, or in brackets."""
    begin, end = ("\x1b[32m", "\x1b[0m") if colour else (OPEN, CLOSE)
    return "".join(f"{begin}{text}{end}" if learned else text for text, learned in pieces(example, tokenizer))


def token_lines(example: Example, tokenizer: Any) -> Iterator[str]:
    """One line a token: position, id, label, text."""
    for position, (token, label) in enumerate(zip(example.input_ids, example.labels, strict=True)):
        yield f"{position:>6} {token:>7} {label:>7}  {tokenizer.decode([int(token)])!r}"


def histogram(lengths: np.ndarray, bins: int = 10) -> list[tuple[int, int, int]]:
    """(shortest, longest, count) of equally wide classes of lengths."""
    low, high = int(lengths.min()), int(lengths.max())
    edges = np.unique(np.linspace(low, high + 1, min(bins, high - low + 1) + 1).round().astype(np.int64))
    counts, _ = np.histogram(lengths, edges)
    return [(int(a), int(b) - 1, int(n)) for a, b, n in zip(edges[:-1], edges[1:], counts, strict=True)]


def summary(data: Datasets, config: DataConfig, *, batch_size: int, seed: int) -> dict[str, Any]:
    """Figures of the training examples; shares are 0 to 1, lengths are tokens.

    packing: how full rows of cutoff_len would be.  padding: the share of padding without packing, at `batch_size`.
    """
    store = data.train
    lengths = store.lengths
    rows = pack(lengths, config.cutoff_len, epoch_generator(seed, 0))
    return {
        "examples": len(store),
        "tokens": int(lengths.sum()),
        "loss_tokens": int(store.loss_lengths.sum()),
        "learned_share": float(store.loss_lengths.sum() / lengths.sum()),
        "lengths": {
            "min": int(lengths.min()),
            "median": float(np.median(lengths)),
            "mean": float(lengths.mean()),
            "p95": float(np.percentile(lengths, 95)),
            "max": int(lengths.max()),
            "histogram": [list(item) for item in histogram(lengths)],
        },
        "at_cutoff": int((lengths >= config.cutoff_len).sum()),
        "packing": {"rows": len(rows), "efficiency": efficiency(rows, lengths, config.cutoff_len)},
        "padding": {"batch_size": batch_size, "share": padding_share(store, batch_size, seed)},
        "eval": data.report.eval,
        "report": data.report.to_dict(),
    }


def padding_share(store: ExampleStore, batch_size: int, seed: int) -> float:
    """Share of a plain loader's places that would be padding in epoch 0 (rows rounded up to 8)."""
    places = 0
    for batch in Loader(store, batch_size, seed).plan(0):
        longest = max(int(store.lengths[row[0]]) for row in batch)
        places += len(batch) * (-(-longest // 8) * 8)
    return 1 - float(store.lengths.sum()) / places


def summary_lines(values: dict[str, Any], config: DataConfig) -> list[str]:
    """The figures for a person."""
    lengths = values["lengths"]
    most = max(count for _, _, count in lengths["histogram"])
    learned = f"{values['loss_tokens']} learned ({values['learned_share']:.1%})"
    middle = f"median {lengths['median']:g}, mean {lengths['mean']:.1f}, 95 % within {lengths['p95']:g}"
    lines = [
        f"{values['examples']} examples, {values['tokens']} tokens, {learned}",
        f"length in tokens: {lengths['min']} to {lengths['max']}, {middle}; cutoff_len {config.cutoff_len}",
    ]
    for low, high, count in lengths["histogram"]:
        lines.append(f"  {low:>6} – {high:<6} {'█' * -(-40 * count // most):<40} {count}")
    packed, padded = values["packing"], values["padding"]
    lines.append(
        f"packing: {packed['rows']} rows of {config.cutoff_len}, {packed['efficiency']:.1%} full; "
        f"without: {padded['share']:.1%} of a batch of {padded['batch_size']} is padding"
    )
    return lines
