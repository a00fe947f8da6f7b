"""Held-out loss, perplexity and token accuracy of a model, or of a base and its tuned self; and their answers.

The figures come from the functions that training uses (`data.build`, `objectives`, `trainer.evaluate`), so `lumen eval`
of a run finds the loss that the run recorded.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lumen.core import ConfigError, note
from lumen.data.build import build_datasets
from lumen.data.examples import ExampleStore
from lumen.data.loader import loader_for
from lumen.eval.prompts import Prompt, held_out_prompts
from lumen.eval.report import EvalReport, Measured, Sample
from lumen.eval.subject import Subject, View, views
from lumen.generate.sampler import generate as answer
from lumen.objectives import objective
from lumen.trainer.config import RunConfig
from lumen.trainer.evaluate import held_out_loss

Progress = Callable[[str], None]


@dataclass(frozen=True)
class HeldOutData:
    """names: the datasets the rows come from.  text: what to call the data."""

    store: ExampleStore
    names: list[str]
    text: str


def with_data(config: RunConfig, names: list[str]) -> RunConfig:
    """The configuration with `names` as its held-out data, all rows of it."""
    update = {"dataset": names, "eval_dataset": names, "val_size": 0.0, "mix_strategy": "concat",
              "interleave_probs": None}  # fmt: skip
    return config.model_copy(update=update)


def held_out_data(config: RunConfig, tokenizer: Any) -> HeldOutData:
    """The held-out rows that a configuration names: eval_dataset, or the part that val_size splits off.

    Raises ConfigError where it names none.
    """
    if config.eval_dataset:
        # Only the held-out rows are needed; naming them as training rows too keeps the training data unread.
        names = list(config.eval_dataset)
        config = with_data(config, names)
        text = ", ".join(names)
    elif config.val_size and config.dataset:
        names = list(config.dataset)
        share = f"{config.val_size:.0%}" if config.val_size < 1 else f"{config.val_size:g} rows"
        text = f"{', '.join(names)} ({share}, seed {config.seed})"
    else:
        raise ConfigError(
            "there are no held-out rows to measure on",
            where="--data, eval_dataset, val_size",
            fix="give --data rows.jsonl (or a name in dataset_info.json with --dataset_dir)",
        )
    datasets = build_datasets(config, tokenizer, seed=config.seed, stage=config.stage)
    (store,) = datasets.eval.values()
    return HeldOutData(store, names, text)


def evaluate(
    subject: Subject, *, generate: int = 0, base: bool = True, loss: bool = True, progress: Progress = lambda _: None
) -> EvalReport:
    """Measure a subject on its configuration's held-out rows.

    generate: answers to the first so many held-out prompts (config's sampling keys decide how they are sampled).
    base:     also the model before training, where there is one.
    loss:     False leaves the figures out (answers only).
    progress: is told one line for each stage.
    Raises LumenError for a model, adapter or data that does not fit.
    """
    config = subject.config
    report: EvalReport | None = None
    for view in views(subject, base=base):
        loaded = view.loaded
        data = held_out_data(config, loaded.tokenizer)
        if report is None:
            dtype = str(loaded.dtype).removeprefix("torch.")
            report = EvalReport(data.text, len(data.store), config.quant.recipe, dtype)
        if loss:
            progress(f"held-out loss of {view.label}: {len(data.store)} rows")
            report.models.append(measure(view, config, data.store))
        if generate:
            prompts = held_out_prompts(config, data.names, data.store, generate)
            if not prompts:
                note("the held-out rows are plain text: there are no prompts to answer")
                generate = 0
                continue
            progress(f"answers of {view.label}: {len(prompts)} prompts")
            _add_answers(report, view, prompts, config)
        del loaded
        view.loaded = None  # type: ignore[assignment]  # a second model must not find the first in memory
        gc.collect()
    assert report is not None, "views yields at least one"
    return report


def measure(view: View, config: RunConfig, store: ExampleStore) -> Measured:
    """Held-out figures of one model."""
    loaded = view.loaded
    loader = loader_for(
        config,
        store,
        batch_size=config.per_device_eval_batch_size,
        seed=config.seed,
        pad_token_id=loaded.tokenizer.pad_token_id,
        stage=config.stage,
        train=False,
    )
    found = held_out_loss(loaded.model, loader.one_pass(), objective(config.stage), loaded.device)
    assert found is not None, "nothing stops it"
    return Measured(
        view.label, view.name, found.loss, found.perplexity, found.accuracy, found.tokens, round(found.seconds, 3)
    )


def _add_answers(report: EvalReport, view: View, prompts: list[Prompt], config: RunConfig) -> None:
    loaded = view.loaded
    ids = [prompt.ids(loaded.tokenizer, config) for prompt in prompts]
    rows = config.per_device_eval_batch_size
    answers = answer(loaded.model, loaded.tokenizer, ids, config, seed=config.seed, batch_size=rows)
    if not report.samples:
        report.samples = [Sample(p.messages, p.reference, {}, p.source) for p in prompts]
    for sample, given in zip(report.samples, answers, strict=True):
        sample.answers[view.label] = given.text
