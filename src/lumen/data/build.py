"""Datasets of a run: find, read, tokenise or take from the cache, hold out, mix."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from lumen.core import ConfigError, DataError
from lumen.data import cache, hub
from lumen.data.config import DataConfig
from lumen.data.examples import ExampleStore, Table
from lumen.data.info import DatasetSpec, find_datasets
from lumen.data.loader import epoch_generator, is_packed
from lumen.data.packing import efficiency, pack
from lumen.data.report import DataReport, DatasetReport
from lumen.data.templates import apply_template
from lumen.data.tokenize import tokenize


@dataclass
class Datasets:
    """What a run trains and is evaluated on.

    train:  the training examples, mixed.
    eval:   held-out examples by name; empty where neither val_size nor eval_dataset is given.
    report: what became of every row.
    """

    train: ExampleStore
    eval: dict[str, ExampleStore]
    report: DataReport


def build_datasets(config: DataConfig, tokenizer: Any, *, seed: int, stage: str = "sft") -> Datasets:
    """The datasets of a configuration.

    seed:  decides the split and the interleaving, nothing else.
    stage: sft (turns, loss on answers) or pt (plain text, loss on everything).

    Raises DataError or ConfigError with file, line and reason for what is wrong.
    """
    if stage not in ("sft", "pt"):
        raise ConfigError(f"stage {stage} is not part of this version", where="stage", fix="sft or pt")
    if config.cutoff_len < 2:
        raise ConfigError(f"cutoff_len is {config.cutoff_len}", where="cutoff_len", fix="at least 2 tokens")
    if config.val_size and config.eval_dataset:
        raise ConfigError(
            "val_size and eval_dataset exclude each other", where="val_size, eval_dataset", fix="keep one"
        )
    if not config.dataset:
        raise ConfigError("no dataset is named", where="dataset", fix="dataset: rows.jsonl")
    if stage == "sft":
        apply_template(tokenizer, config.template)
    report = DataReport(template=config.template or "the tokenizer's own")
    specs = find_datasets(config.dataset, config.dataset_dir)
    tables = _tables(specs, config, tokenizer, stage, report)
    train, held = _hold_out(tables, config.val_size, seed)
    train = [_repeat(part, spec, config, seed) for part, spec in zip(train, specs, strict=True)]
    evaluation: dict[str, ExampleStore] = {}
    if held is not None:
        evaluation["eval"] = ExampleStore(tables, held)
    if config.eval_dataset:
        evaluation["eval"] = ExampleStore(
            _tables(find_datasets(config.eval_dataset, config.dataset_dir), config, tokenizer, stage, report)
        )
    store = ExampleStore(tables, _mix(train, config, seed))
    report.train = len(store)
    if is_packed(config, stage):
        rows = pack(store.lengths, config.cutoff_len, epoch_generator(seed, 0))
        report.packing = {"rows": len(rows), "efficiency": efficiency(rows, store.lengths, config.cutoff_len)}
    report.eval = {name: len(held_out) for name, held_out in evaluation.items()}
    return Datasets(store, evaluation, report)


def _tables(
    specs: list[DatasetSpec], config: DataConfig, tokenizer: Any, stage: str, report: DataReport
) -> list[Table]:
    printed = cache.tokenizer_fingerprint(tokenizer)
    tables = []
    for named in specs:
        spec = hub.fetch(named) if named.hub else named
        table, part = _table(spec, config, tokenizer, printed, stage)
        tables.append(table)
        report.datasets.append(part)
    return tables


def _table(
    spec: DatasetSpec, config: DataConfig, tokenizer: Any, printed: str, stage: str
) -> tuple[Table, DatasetReport]:
    directory = cache.cache_root(config) / cache.cache_key(spec, config, printed, stage)
    found = None if config.overwrite_cache else cache.load(directory, config)
    if found is not None:
        return found
    table, part = tokenize(spec, config, tokenizer, stage)
    cache.store(directory, table, part)
    return table, part


def _hold_out(tables: list[Table], val_size: float, seed: int) -> tuple[list[np.ndarray], np.ndarray | None]:
    """Picks of each dataset that are trained on, and the held-out picks; all examples of a row on one side."""
    picks = [np.stack([np.full(len(t), n, np.int64), np.arange(len(t))], 1) for n, t in enumerate(tables)]
    if not val_size:
        return picks, None
    rows = []
    for n, table in enumerate(tables):
        changes = np.ones(len(table), bool)
        changes[1:] = (np.diff(table.files) != 0) | (np.diff(table.rows) != 0)
        rows.append(np.stack([np.full(len(table), n, np.int64), np.cumsum(changes) - 1], 1))
    groups, group_of = np.unique(np.concatenate(rows), axis=0, return_inverse=True)
    total = len(groups)
    count = int(val_size) if val_size >= 1 else math.ceil(val_size * total - 1e-9)
    if val_size < 0 or count >= total:
        raise DataError(f"val_size {val_size:g} leaves nothing to train on: {total} rows", where="val_size")
    chosen = np.zeros(total, bool)
    chosen[epoch_generator(seed, 0).permutation(total)[:count]] = True
    held = chosen[group_of.reshape(-1)]
    everything = np.concatenate(picks)
    train = [everything[~held & (everything[:, 0] == n)] for n in range(len(tables))]
    return train, everything[held]


def _repeat(part: np.ndarray, spec: DatasetSpec, config: DataConfig, seed: int) -> np.ndarray:
    """dataset_info.json's num_samples beyond what there is: whole repeats, then a seeded choice for the rest."""
    wanted = spec.num_samples or 0
    if config.max_samples is not None:
        wanted = min(wanted, config.max_samples)
    if len(part) == 0 or wanted <= len(part):
        return part
    whole, rest = divmod(wanted, len(part))
    chosen = epoch_generator(seed, 2).permutation(len(part))[:rest]
    return np.concatenate([part] * whole + [part[np.sort(chosen)]])


def _mix(parts: list[np.ndarray], config: DataConfig, seed: int) -> np.ndarray:
    """One order over all datasets, as `mix_strategy` says."""
    if config.mix_strategy == "concat" or len(parts) == 1:
        if config.interleave_probs and config.mix_strategy == "concat":
            raise ConfigError("interleave_probs without interleaving", where="interleave_probs, mix_strategy")
        return np.concatenate(parts)
    probs = config.interleave_probs
    if probs and len(probs) != len(parts):
        raise ConfigError(
            f"{len(probs)} interleave_probs for {len(parts)} datasets", where="interleave_probs", fix="one for each"
        )
    weights = np.asarray(probs or [1.0] * len(parts), np.float64)
    if not (weights > 0).all():
        raise ConfigError("interleave_probs must all be above 0", where="interleave_probs")
    if any(len(part) == 0 for part in parts):
        raise DataError("a dataset to interleave is empty after the split", where="mix_strategy")
    order = interleave([len(part) for part in parts], weights if probs else None, config.mix_strategy, seed)
    return np.stack([parts[which][index] for which, index in order])


def interleave(lengths: list[int], weights: np.ndarray | None, how: str, seed: int) -> list[tuple[int, int]]:
    """(dataset, example) in the order of interleaving.

    interleave_under: until the first dataset is used up; interleave_over: until all are, the short ones repeating;
    interleave_once: until all are, each example once.  Without weights the datasets take turns.
    """
    generator = epoch_generator(seed, 1)
    used = [0] * len(lengths)
    open_ = [True] * len(lengths)
    result: list[tuple[int, int]] = []
    turn = 0
    while True:
        alive = [n for n in range(len(lengths)) if how != "interleave_once" or open_[n]]
        if weights is None:
            which = alive[turn % len(alive)] if how != "interleave_once" else min(alive, key=lambda n: (used[n], n))
            turn += 1
        else:
            share = weights[alive]
            which = int(generator.choice(alive, p=share / share.sum()))
        result.append((which, used[which] % lengths[which]))
        used[which] += 1
        if used[which] >= lengths[which]:
            open_[which] = False
            if how == "interleave_under" or not any(open_):
                return result
