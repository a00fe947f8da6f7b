"""Held-out rows: what source and export are compared on, and what static scales are calibrated on.

In order: the file the user names; `eval_dataset` or `val_size` of the configuration; the held-out set of the run that
an adapter belongs to; a text that comes with Lumen (English, Chinese, code and figures, written for this purpose).
Rows go through the data room, so a chat row is rendered and masked as in training and only its learned tokens count;
of a plain text every token does.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import torch

from lumen.core import ConfigError, LumenError, note
from lumen.data.build import build_datasets
from lumen.data.examples import ExampleStore
from lumen.eval.evaluate import held_out_data, with_data
from lumen.trainer.config import RunConfig

WINDOW = 512
"""Tokens of a row at most; longer texts are cut into windows."""


@dataclass
class Rows:
    """name: what the rows are.  ids: int64 [T] each.  scored: bool [T], True where the token's prediction counts."""

    name: str
    ids: list[torch.Tensor]
    scored: list[torch.Tensor]

    @property
    def tokens(self) -> int:
        """Predictions that count."""
        return int(sum(mask.sum() for mask in self.scored))


def verification_rows(config: Any, tokenizer: Any) -> Rows:
    """Rows of the comparison.  Raises LumenError for a file that cannot be read."""
    limit = config.export_verify_tokens
    if config.export_verify_data:
        return _from_file(config.export_verify_data, "export_verify_data", config, tokenizer, limit)
    run = _as_run(config)
    if run.eval_dataset or (run.val_size and run.dataset):
        found = held_out_data(run, tokenizer)
        return _from_store(_short(found.text), found.store, limit)
    return _of_the_run(config, tokenizer, limit) or _bundled("held_out", tokenizer, limit)


def calibration_rows(config: Any, tokenizer: Any) -> Rows:
    """Rows on which activations are measured; never those of the comparison unless the user names the same."""
    limit = config.export_calibration_tokens
    if config.export_calibration_data:
        return _from_file(config.export_calibration_data, "export_calibration_data", config, tokenizer, limit)
    run = _as_run(config)
    if run.dataset:
        store = build_datasets(run, tokenizer, seed=run.seed, stage=run.stage).train
        return _from_store(_short(", ".join(run.dataset)), store, limit)
    return _bundled("calibration", tokenizer, limit)


def _short(names: str) -> str:
    """Names of datasets without the folders of files: a model card is read elsewhere."""
    return ", ".join(part.rpartition("/")[2] for part in names.split(", "))


def _as_run(config: Any) -> RunConfig:
    """A RunConfig of what the configuration says; a file's configuration is one already."""
    if isinstance(config, RunConfig):
        return config
    shared = {name: getattr(config, name) for name in RunConfig.model_fields if name in type(config).model_fields}
    return RunConfig(**shared)


def _from_file(name: str, key: str, config: Any, tokenizer: Any, limit: int) -> Rows:
    path = Path(name).expanduser()
    if path.suffix.lower() in (".txt", ".md"):
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{name} cannot be read: {error}", where=key, fix="give a UTF-8 text file") from error
        rows = _from_text(path.name, text, tokenizer, limit)
    else:
        run = with_data(_as_run(config), [name])
        rows = _from_store(path.name, build_datasets(run, tokenizer, seed=run.seed, stage=run.stage).train, limit)
    if not rows.tokens:
        raise ConfigError(f"{name} has no tokens to compare on", where=key, fix="give more text")
    return rows


def _of_the_run(config: Any, tokenizer: Any, limit: int) -> Rows | None:
    """The held-out set of the run that wrote the last adapter, or the model itself; None where there is none."""
    from lumen.eval.runs import read_run

    for name in [*reversed(config.adapter_name_or_path or []), config.model_name_or_path]:
        folder = Path(str(name)).expanduser()
        for place in (folder, folder.parent):
            if not (place / "config.yaml").is_file() or not (place / "metrics.jsonl").is_file():
                continue
            try:
                values = read_run(place).config
                run = RunConfig(**{k: v for k, v in values.items() if k in RunConfig.model_fields})
                if not (run.eval_dataset or run.val_size):
                    return None
                found = held_out_data(run, tokenizer)
            except (LumenError, ValueError, OSError) as error:
                note(f"the run's held-out rows cannot be read ({str(error).splitlines()[0]}); Lumen's text is used")
                return None
            return _from_store(f"{_short(found.text)} of {place.name}", found.store, limit)
    return None


def bundled_text(name: str) -> str:
    """A text that comes with Lumen: `held_out` or `calibration`."""
    return resources.files("lumen.export").joinpath(f"{name}.txt").read_text(encoding="utf-8")


def _bundled(name: str, tokenizer: Any, limit: int) -> Rows:
    return _from_text(f"Lumen's {name.replace('_', '-')} text", bundled_text(name), tokenizer, limit)


def _from_text(name: str, text: str, tokenizer: Any, limit: int) -> Rows:
    """Windows of at most WINDOW tokens; each begins as the tokenizer begins a text (with or without bos)."""
    bare = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    bos = tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id] and tokenizer.bos_token_id is not None
    head = [tokenizer.bos_token_id] if bos else []
    step = WINDOW - len(head)
    rows = [torch.tensor([*head, *bare[i : i + step]]) for i in range(0, len(bare), step)]
    masks = [torch.arange(len(row)) > 0 for row in rows]
    return _limited(Rows(name, rows, masks), limit)


def _from_store(name: str, store: ExampleStore, limit: int) -> Rows:
    rows, masks, total = [], [], 0
    for example in store:
        rows.append(torch.from_numpy(example.input_ids[: 4 * WINDOW].copy()))
        masks.append(torch.from_numpy(example.labels[: 4 * WINDOW] != -100))
        total += int(masks[-1].sum())
        if total >= limit:
            break
    return _limited(Rows(name, rows, masks), limit)


def _limited(rows: Rows, limit: int) -> Rows:
    """The first rows until `limit` predictions; the last one is cut."""
    ids, scored, left = [], [], limit
    for row, mask in zip(rows.ids, rows.scored, strict=True):
        if left <= 0:
            break
        if int(mask.sum()) > left:
            end = int(torch.nonzero(mask)[left - 1]) + 1
            row, mask = row[:end], mask[:end]
        if len(row) > 1 and bool(mask[1:].any()):
            mask = mask.clone()
            mask[0] = False
            ids.append(row)
            scored.append(mask)
            left -= int(mask.sum())
    return Rows(rows.name, ids, scored)
