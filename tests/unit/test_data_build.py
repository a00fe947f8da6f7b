"""Datasets of a configuration: where they are found, how many rows are taken, how they are split and mixed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.helpers import shared_data, tiny_tokenizer

from lumen.core import ConfigError, DataError
from lumen.data import hub
from lumen.data.build import Datasets, build_datasets, interleave
from lumen.data.config import DataConfig
from lumen.data.info import DatasetSpec, find_datasets


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LUMEN_CACHE", str(tmp_path / "cache"))


def build(stage: str = "sft", seed: int = 0, **config: Any) -> Datasets:
    return build_datasets(DataConfig(**config), tiny_tokenizer(), seed=seed, stage=stage)


def folder(tmp_path: Path, info: dict[str, Any], **files: Any) -> str:
    (tmp_path / "data").mkdir(exist_ok=True)
    (tmp_path / "data" / "dataset_info.json").write_text(json.dumps(info), "utf-8")
    for name, rows in files.items():
        (tmp_path / "data" / f"{name}.json").write_text(json.dumps(rows), "utf-8")
    return str(tmp_path / "data")


def rows(count: int, mark: str = "") -> list[dict[str, Any]]:
    return [{"instruction": f"q{mark}{n}", "output": f"a{mark}{n}"} for n in range(count)]


def test_names_are_looked_up_in_dataset_info_and_paths_are_files(tmp_path: Path) -> None:
    directory = folder(
        tmp_path,
        {
            "mine": {"file_name": "mine.json", "columns": {"prompt": "q", "response": "a"}},
            "talk": {"file_name": "talk.json", "formatting": "sharegpt", "columns": {"messages": "turns"},
                     "tags": {"role_tag": "who", "content_tag": "what", "user_tag": "u", "assistant_tag": "b"}},
        },
        mine=[{"q": "1", "a": "one"}],
        talk=[{"turns": [{"who": "u", "what": "2"}, {"who": "b", "what": "two"}]}],
        free=rows(2),
    )  # fmt: skip
    data = build(dataset="mine, talk, free.json", dataset_dir=directory)
    assert [report.name for report in data.report.datasets] == ["mine", "talk", "free.json"]
    text = [tiny_tokenizer().decode(example.input_ids[example.labels != -100]) for example in data.train]
    assert text == [f"{answer}<|im_end|>" for answer in ("one", "two", "a0", "a1")]


def test_a_folder_is_its_data_files_in_order(tmp_path: Path) -> None:
    directory = folder(tmp_path, {"both": {"file_name": "parts"}})
    (tmp_path / "data" / "parts").mkdir()
    for name in ("b", "a"):
        (tmp_path / "data" / "parts" / f"{name}.jsonl").write_text(json.dumps(rows(1, name)[0]), "utf-8")
    data = build(dataset="both", dataset_dir=directory)
    assert [Path(example.source).name for example in data.train] == ["a.jsonl:1", "b.jsonl:1"]


@pytest.mark.parametrize(
    ("info", "name", "what", "fix"),
    [
        ({"identity": {"file_name": "x.json"}}, "identty", "is not in", "did you mean 'identity'?"),
        ({"x": {"file_name": "gone.json"}}, "x", "does not exist", ""),
        ({"x": {"file_nam": "x.json"}}, "x", "unknown key 'file_nam'", "did you mean 'file_name'?"),
        ({"x": {"file_name": "x.json", "columns": {"promt": "q"}}}, "x", "unknown key 'promt'", "'prompt'"),
        ({"x": {"file_name": "x.json", "formatting": "sharegtp"}}, "x", "formatting 'sharegtp' is unknown", "sharegpt"),
        ({"x": {"ms_hub_url": "a/b"}}, "x", "ms_hub_url is not supported", "file_name"),
        ({"x": {"file_name": "x.json", "num_samples": 0}}, "x", "num_samples must be", ""),
        ({"x": {"file_name": "x.json", "split": "test"}}, "x", "split chooses among a hub dataset's files", ""),
        ({"x": ["x.json"]}, "x", "expected an object, got a list", ""),
        ({}, "rows.json", "no data file rows.json", "check the path"),
    ],
)
def test_mistakes_in_dataset_info_name_the_entry(
    tmp_path: Path, info: dict[str, Any], name: str, what: str, fix: str
) -> None:
    directory = folder(tmp_path, info, x=rows(1))
    with pytest.raises(DataError) as caught:
        build(dataset=name, dataset_dir=directory)
    assert what in caught.value.what
    assert fix in caught.value.fix
    assert caught.value.where


def test_llama_factorys_own_entries_are_read(tmp_path: Path) -> None:
    """Shapes of entries of LLaMA-Factory's data folder."""
    info = {
        "identity": {"file_name": "identity.json"},
        "glaive_toolcall_en_demo": {"file_name": "g.json", "formatting": "sharegpt",
                                    "columns": {"messages": "conversations", "tools": "tools"}},
        "mllm_demo": {"file_name": "m.json", "formatting": "sharegpt",
                      "columns": {"messages": "messages", "images": "images"},
                      "tags": {"role_tag": "role", "content_tag": "content", "user_tag": "user",
                               "assistant_tag": "assistant"}},
        "wiki_demo": {"file_name": "wiki_demo.txt", "columns": {"prompt": "text"}},
        "c4_demo": {"file_name": "c4_demo.jsonl", "columns": {"prompt": "text"}},
        "dpo_en_demo": {"file_name": "d.json", "ranking": True, "formatting": "sharegpt",
                        "columns": {"messages": "conversations", "chosen": "chosen", "rejected": "rejected"}},
    }  # fmt: skip
    directory = folder(tmp_path, info, identity=rows(1), g=[], m=[], d=[])
    (tmp_path / "data" / "wiki_demo.txt").write_text("one\n\ntwo\n", "utf-8")
    (tmp_path / "data" / "c4_demo.jsonl").write_text('{"text": "three", "url": "u"}\n', "utf-8")
    specs = find_datasets(list(info), directory)
    assert [spec.ranking for spec in specs] == [False] * 5 + [True]
    assert len(build(dataset="identity", dataset_dir=directory).train) == 1
    data = build("pt", dataset="wiki_demo,c4_demo", dataset_dir=directory)
    assert [example.input_ids[-1] for example in data.train] == [tiny_tokenizer().eos_token_id] * 3
    with pytest.raises(DataError, match="no response column"):
        build(dataset="wiki_demo", dataset_dir=directory)


def test_preference_rows_are_refused_for_sft() -> None:
    with pytest.raises(DataError, match="preference rows"):
        build(dataset=str(shared_data("dpo_en_demo.json")))


@pytest.mark.parametrize(("val_size", "held"), [(0.1, 3), (0.01, 1), (5, 5)])
def test_val_size_is_a_share_or_a_count_and_the_split_depends_on_the_seed_only(
    tmp_path: Path, val_size: float, held: int
) -> None:
    directory = folder(tmp_path, {}, x=rows(25))
    data, again = (build(dataset="x.json", dataset_dir=directory, val_size=val_size) for _ in range(2))
    assert len(data.eval["eval"]) == held
    assert len(data.train) == 25 - held
    sources = [example.source for example in data.eval["eval"]]
    assert sources == [example.source for example in again.eval["eval"]]
    other = build(seed=1, dataset="x.json", dataset_dir=directory, val_size=val_size)
    assert sources != [example.source for example in other.eval["eval"]]
    assert not set(sources) & {example.source for example in data.train}


def test_limits_conflicts_and_impossible_splits(tmp_path: Path) -> None:
    directory = folder(tmp_path, {}, x=rows(4))
    for config, error in (
        ({"val_size": 4}, "leaves nothing to train on"), ({"val_size": 0.1, "eval_dataset": "x.json"}, "exclude"),
        ({"cutoff_len": 1}, "cutoff_len"), ({"template": "lama3"}, "did you mean 'llama3'"),
        ({"interleave_probs": "0.5,0.5"}, "interleave_probs"),
    ):  # fmt: skip
        with pytest.raises((DataError, ConfigError), match=error):
            build(dataset="x.json", dataset_dir=directory, **config)
    with pytest.raises(ConfigError, match="stage dpo"):
        build("dpo", dataset="x.json", dataset_dir=directory)
    data = build(dataset="x.json", eval_dataset="x.json", dataset_dir=directory, max_samples=2)
    assert (len(data.train), len(data.eval["eval"])) == (2, 2)


def test_num_samples_takes_fewer_or_repeats(tmp_path: Path) -> None:
    info = {name: {"file_name": "x.json", "num_samples": n} for name, n in (("few", 3), ("many", 11))}
    directory = folder(tmp_path, info, x=rows(4))
    assert len(build(dataset="few", dataset_dir=directory).train) == 3
    data = build(dataset="many", dataset_dir=directory)
    counts = np.unique([example.source for example in data.train], return_counts=True)[1]
    assert sorted(counts) == [2, 3, 3, 3]
    assert len(build(dataset="many", dataset_dir=directory, max_samples=2).train) == 2


def test_interleaving_ends_as_its_name_says() -> None:
    under = interleave([2, 5], None, "interleave_under", 0)
    assert under == [(0, 0), (1, 0), (0, 1)]
    over = interleave([2, 5], None, "interleave_over", 0)
    assert over == [(0, 0), (1, 0), (0, 1), (1, 1), (0, 0), (1, 2), (0, 1), (1, 3), (0, 0), (1, 4)]
    once = interleave([2, 5], None, "interleave_once", 0)
    assert sorted(once) == [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2), (1, 3), (1, 4)]
    weights = np.array([0.9, 0.1])
    drawn = interleave([1000, 1000], weights, "interleave_under", 3)
    assert 0.86 < np.mean([which == 0 for which, _ in drawn]) < 0.94
    assert drawn == interleave([1000, 1000], weights, "interleave_under", 3)
    assert sorted(interleave([3, 4], weights, "interleave_once", 0)) == [(0, n) for n in range(3)] + [
        (1, n) for n in range(4)
    ]


def test_a_mixed_store_keeps_its_tables(tmp_path: Path) -> None:
    directory = folder(tmp_path, {}, x=rows(2, "x"), y=rows(3, "y"))
    data = build(dataset="x.json,y.json", dataset_dir=directory, mix_strategy="interleave_over")
    names = [Path(example.source.split(":")[0]).stem for example in data.train]
    assert names == ["x", "y"] * 3
    assert data.train.lengths.tolist() == [len(example.input_ids) for example in data.train]
    assert data.train.loss_lengths.tolist() == [int((e.labels != -100).sum()) for e in data.train]


def test_pretraining_text_is_cut_into_pieces_that_lose_no_token(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    text = [f"document {n} " + "word " * 30 * n for n in range(1, 5)]
    path = tmp_path / "t.txt"
    path.write_text("\n".join(text), "utf-8")
    data = build("pt", dataset=str(path), cutoff_len=40)
    ids = np.concatenate([example.input_ids for example in data.train])
    whole = [i for line in text for i in [*tokenizer(line)["input_ids"], tokenizer.eos_token_id]]
    assert ids.tolist() == whole
    assert data.train.lengths.max() <= 40
    assert data.report.packing["efficiency"] > 0.9
    assert (data.report.datasets[0].rows, data.report.datasets[0].kept) == (4, 4)


def test_hub_datasets_choose_the_files_of_their_split(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    names = [
        "README.md", "data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet", "data/test-0.parquet",
        "zh/train.json", "zh/dev.json", "all.jsonl",
    ]  # fmt: skip
    spec = DatasetSpec("x", hub="a/b")
    assert hub.choose(names, spec) == names[1:3]
    spec.folder = "zh"
    assert hub.choose(names, spec) == ["zh/train.json"]
    spec.split = "validation"
    with pytest.raises(DataError, match="no data file of split 'validation' in folder zh"):
        hub.choose(names, spec)
    assert hub.choose(["corpus.jsonl", "test.jsonl"], DatasetSpec("x", hub="a/b")) == ["corpus.jsonl"]

    import huggingface_hub

    (tmp_path / "train.json").write_text(json.dumps(rows(3)), "utf-8")

    class Api:
        def list_repo_files(self, repo: str, repo_type: str) -> list[str]:
            assert (repo, repo_type) == ("a/b", "dataset")
            return ["train.json"]

    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda repo, name, repo_type: str(tmp_path / name))
    directory = folder(tmp_path, {"x": {"hf_hub_url": "a/b"}})
    assert len(build(dataset="x", dataset_dir=directory).train) == 3

    def offline(*_: Any, **__: Any) -> None:
        raise ConnectionError("no network\nat all")

    monkeypatch.setattr(Api, "list_repo_files", offline)
    with pytest.raises(DataError, match="cannot be fetched from the hub: no network"):
        build(dataset="x", dataset_dir=directory)
