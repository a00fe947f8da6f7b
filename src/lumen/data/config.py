"""What is read and how it becomes token rows: the data's part of the flat configuration."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator

from lumen.core import Config, Count, Float, NonNegative, StrList


def _as_list(value: object) -> object:
    if isinstance(value, str):
        return [part.strip() for part in value.split(",") if part.strip()]
    return value


FloatList = Annotated[list[Float], BeforeValidator(_as_list)]


class DataConfig(Config):
    """Datasets, rendering, packing and the loader (LLaMA-Factory's names and defaults)."""

    dataset: StrList | None = None
    """Names in dataset_info.json, or paths of files, comma separated. No default: training needs it."""

    eval_dataset: StrList | None = None
    """Held-out datasets, named in the same way. Default: none."""

    dataset_dir: str = "data"
    """Folder with dataset_info.json and the files it names. Default: data."""

    template: str | None = None
    """A named chat template. Default: the tokenizer's own."""

    default_system: str | None = None
    """System message of rows that have none. Default: the template's own."""

    enable_thinking: bool | None = True
    """Whether reasoning templates think: true, false, or null to leave rows as they are. Default: true."""

    cutoff_len: Count = 2048
    """Longest row, in tokens. Default: 2048."""

    train_on_prompt: bool = False
    """Learn the prompt's tokens too. Default: false."""

    mask_history: bool = False
    """Learn the last assistant turn only. Default: false."""

    mix_strategy: Literal["concat", "interleave_under", "interleave_over", "interleave_once"] = "concat"
    """How several datasets are joined. Default: concat."""

    interleave_probs: FloatList | None = None
    """Probability of each dataset when interleaving, comma separated. Default: equal."""

    max_samples: Count | None = None
    """Rows taken of each dataset. Default: all."""

    val_size: NonNegative = 0.0
    """Held-out part of `dataset`: a share below 1, or a number of rows. Default: 0."""

    packing: bool | None = None
    """Put several examples in a row; they never see each other. Default: null, which is true for stage pt."""

    neat_packing: bool = False
    """LLaMA-Factory's name for packing with isolation; here the same as packing: true. Default: false."""

    overwrite_cache: bool = False
    """Tokenise again even where a cache with the same content key exists. Default: false."""

    tokenized_path: str | None = None
    """Folder of the tokenised cache. Default: Lumen's own cache folder."""

    group_by_length: bool = False
    """Batches of examples of like length, for less padding without packing. Default: false."""

    train_sampling_strategy: Literal["random", "sequential", "group_by_length"] = "random"
    """Order of the examples: a seeded shuffle, the files' own, or the shuffle with group_by_length. Default: random."""

    dataloader_drop_last: bool = False
    """Leave out an epoch's last micro-batch where it is smaller than the others. Default: false: it trains too, and its
    loss divides by its own tokens."""

    disable_shuffling: bool = False
    """Keep the order of the files. Default: false."""

    on_bad_rows: Literal["raise", "skip"] = "raise"
    """A row that cannot be read: stop with file:line, or count it and keep a reject file. Default: raise."""

    encoding: str = "utf-8"
    """Text encoding of json, jsonl, csv and txt files. Default: utf-8 (a BOM is accepted)."""
