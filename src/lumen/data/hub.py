"""A dataset on the Hugging Face hub: which of its files are wanted, and fetching them.

Nothing but a `hf_hub_url` entry named in `dataset` leads here, so the network is used only where it was asked for; with
HF_HUB_OFFLINE=1 only what is in the hub's own cache is read.  Rows are then read by our readers, as local files are.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path, PurePosixPath

from lumen.core import DataError
from lumen.data.info import DatasetSpec
from lumen.data.readers import SUFFIXES

_OTHER_SPLITS = ("train", "test", "validation", "valid", "val", "dev", "eval")


def fetch(spec: DatasetSpec) -> DatasetSpec:
    """The spec with its files on this machine.  Raises DataError where the hub or the files cannot be had."""
    import huggingface_hub

    where = f"dataset {spec.name!r} (hf_hub_url {spec.hub})"
    try:
        names = huggingface_hub.HfApi().list_repo_files(spec.hub, repo_type="dataset")
        wanted = choose(names, spec)
        files = [huggingface_hub.hf_hub_download(spec.hub, name, repo_type="dataset") for name in wanted]
    except DataError:
        raise
    except Exception as error:  # hub, network and file errors have no common base class
        reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise DataError(
            f"the dataset cannot be fetched from the hub: {reason}",
            where=where,
            fix="check the name and the network, or download the files and give them as file_name",
        ) from None
    return replace(spec, files=[Path(file) for file in files])


def choose(names: list[str], spec: DatasetSpec) -> list[str]:
    """The data files of the entry's folder, subset and split.  Raises DataError with what there is otherwise."""
    files = [n for n in names if PurePosixPath(n).suffix.lower() in SUFFIXES and "dataset_info" not in n.lower()]
    files = [n for n in files if n.lower().rsplit("/", 1)[-1] not in ("readme.txt", "license.txt", "requirements.txt")]
    chosen = files
    if spec.folder:
        chosen = [n for n in chosen if n.startswith(spec.folder.strip("/") + "/")]
    if spec.subset:
        chosen = [n for n in chosen if _named(n, spec.subset)]
    named = [n for n in chosen if _named(n, spec.split)]
    others = [split for split in _OTHER_SPLITS if split != spec.split]
    if named:
        chosen = named
    elif spec.split == "train":
        chosen = [n for n in chosen if not any(_named(n, split) for split in others)]
    else:
        chosen = []
    if not chosen:
        part = ", ".join(f"{k} {v}" for k, v in (("folder", spec.folder), ("subset", spec.subset)) if v)
        raise DataError(
            f"no data file of split {spec.split!r}{' in ' + part if part else ''}",
            where=f"dataset {spec.name!r} (hf_hub_url {spec.hub})",
            fix=f"the repository has: {', '.join(files[:12]) or 'no file in a format that is read'}",
        )
    suffixes = {PurePosixPath(n).suffix.lower() for n in chosen}
    best = next(s for s in (".parquet", ".jsonl", ".json", ".csv", ".tsv", ".txt") if s in suffixes)
    return sorted(n for n in chosen if n.lower().endswith(best))  # the same rows in two formats are read once


def _named(path: str, part: str) -> bool:
    """Whether a folder or the file's name is `part`, or begins or ends with it as a word (`train-00000-of-2`)."""
    return re.search(rf"(^|[/._-]){re.escape(part)}([/._-]|$)", path) is not None
