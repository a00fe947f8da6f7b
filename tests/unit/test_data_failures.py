"""The data rows of FIELD_FAILURES: each happened to someone with another tool; each is a small input here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.helpers import tiny_model, tiny_tokenizer

from lumen.core import DataError
from lumen.data.batch import collate
from lumen.data.build import Datasets, build_datasets
from lumen.data.config import DataConfig
from lumen.data.examples import IGNORE, Example
from lumen.data.render import prompt_ids
from lumen.models.attention import model_inputs
from lumen.objectives.sft import loss_sum


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LUMEN_CACHE", str(tmp_path / "cache"))


def build(path: Path | str, *, tokenizer: Any = None, **config: Any) -> Datasets:
    return build_datasets(DataConfig(dataset=str(path), **config), tokenizer or tiny_tokenizer(), seed=0)


def rows_file(tmp_path: Path, *rows: Any, name: str = "rows.json") -> Path:
    path = tmp_path / name
    path.write_text(json.dumps(list(rows)), "utf-8")
    return path


def row(output: Any = "yes", instruction: str = "Is it?") -> dict[str, Any]:
    return {"instruction": instruction, "output": output}


@pytest.mark.parametrize(
    ("line", "reason"),
    [('{"a":1}{"b":2}', "more text after the JSON value at column 8"), ('{"a":1', "ends inside a JSON value")],
)
def test_broken_jsonl_line_names_file_line_and_reason_or_is_skipped_and_kept_aside(
    tmp_path: Path, line: str, reason: str
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join([json.dumps(row()), json.dumps(row("no")), line, json.dumps(row("maybe"))]), "utf-8")
    with pytest.raises(DataError) as caught:
        build(path)
    assert caught.value.where == f"{path}:3"
    assert reason in caught.value.what
    data = build(path, on_bad_rows="skip")
    (report,) = data.report.datasets
    assert (report.rows, report.kept, len(report.rejected)) == (4, 3, 1)
    data.report.write(tmp_path / "run")
    (kept,) = [json.loads(text) for text in (tmp_path / "run" / "rejects.jsonl").read_text("utf-8").splitlines()]
    assert kept == {"place": f"{path}:3", "why": "rejected", "reason": kept["reason"], "row": line}
    with pytest.raises(DataError):  # the cache of the run that skipped does not hide the bad row
        build(path)


def test_mixed_types_in_a_column_name_row_field_and_type(tmp_path: Path) -> None:
    path = rows_file(tmp_path, row("a"), row(["b"]))
    with pytest.raises(DataError) as caught:
        build(path)
    assert caught.value.what == "row 2, field output: expected text, got a list"
    assert caught.value.where == f"{path}:1 (row 2)"


@pytest.mark.parametrize(
    ("bad", "reason"),
    [(row(None), "output is null"), (row(""), "output is empty"), (row("  \n"), "output is empty"),
     ({"instruction": "Is it?"}, "output is missing")],
)  # fmt: skip
def test_output_null_empty_or_missing_is_named_counted_and_not_trained_on(
    tmp_path: Path, bad: dict[str, Any], reason: str
) -> None:
    data = build(rows_file(tmp_path, row("a"), bad))
    (report,) = data.report.datasets
    assert (report.rows, report.kept, len(data.train)) == (2, 1, 1)
    (dropped,) = report.dropped
    assert (dropped.reason, dropped.row) == (reason, bad)
    assert any(reason in line for line in data.report.lines())


def test_utf8_with_byte_order_mark_is_accepted(tmp_path: Path) -> None:
    for name, text in (("a.json", json.dumps([row("好")])), ("b.jsonl", json.dumps(row("好"))),
                       ("c.csv", "instruction,output\nIs it?,好\n")):  # fmt: skip
        path = tmp_path / name
        path.write_bytes(b"\xef\xbb\xbf" + text.encode())
        assert len(build(path).train) == 1


@pytest.mark.parametrize("name", ["rows.json", "rows.jsonl", "rows.csv"])
def test_gbk_file_is_named_with_the_encoding_to_set_and_reads_with_it(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    text = {
        "rows.json": json.dumps([row("a"), row("你好世界", "来信")], ensure_ascii=False, indent=0),
        "rows.jsonl": "\n".join(json.dumps(r, ensure_ascii=False) for r in (row("a"), row("你好世界", "来信"))),
        "rows.csv": "instruction,output\nIs it?,a\n来信,你好世界\n",
    }[name]
    path.write_bytes(text.encode("gbk"))
    assert 0xC0 in path.read_bytes()
    with pytest.raises(DataError) as caught:
        build(path)
    assert "encoding: gb18030" in caught.value.fix
    assert "byte 0xc0" in caught.value.what
    assert "is not utf-8 text" in caught.value.what
    offset = path.read_bytes().index(b"\xc0")
    assert f"offset {offset}" in caught.value.what
    tokenizer = tiny_tokenizer()
    data = build(path, encoding="gb18030", tokenizer=tokenizer)
    assert "你好世界" in tokenizer.decode(data.train[1].input_ids)


def test_prompt_longer_than_cutoff_len_is_dropped_and_counted_and_all_rows_so_is_an_error(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    short, template = row("ok", "?"), 20  # the template alone takes about this many tokens
    system = {"instruction": "?", "output": "x", "history": [["a" * 40, "b" * 40]]}
    assert len(build(rows_file(tmp_path, short)).train[0].input_ids) < template + 20
    data = build(rows_file(tmp_path, short, system), cutoff_len=32, mask_history=True, tokenizer=tokenizer)
    assert all((example.labels != IGNORE).any() for example in data.train)
    with pytest.raises(DataError) as caught:
        build(rows_file(tmp_path, short, row("yes")), cutoff_len=8)
    assert "2 with nothing to learn" in caught.value.what
    assert "cutoff_len" in caught.value.what


def test_the_assistant_header_is_never_the_part_cut_off(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    long = " ".join(f"word{n}" for n in range(200))
    for output in ("short", long):
        for cutoff in (40, 64, 128):
            data = build(rows_file(tmp_path, row(output, f"BEGIN {long} END")), cutoff_len=cutoff)
            (example,) = data.train
            assert len(example.input_ids) <= cutoff
            learned = example.labels != IGNORE
            first = int(np.argmax(learned))
            prompt = tokenizer.decode(example.input_ids[:first])
            assert prompt.startswith("<|im_start|>user\nBE")
            assert prompt.endswith("ND<|im_end|>\n<|im_start|>assistant\n")
            assert learned[first:].all()
            answer = tokenizer.decode(example.input_ids[first:])
            assert output.startswith(answer.removesuffix("<|im_end|>"))
            assert answer.endswith("<|im_end|>") == (answer == output + "<|im_end|>")  # no end is learned where cut
    assert data.report.datasets[0].truncated == 1


@pytest.mark.parametrize("template", [None, "llama3", "chatml"])
def test_template_and_tokenizer_that_both_add_bos_give_exactly_one_and_chat_has_the_same_ids(
    tmp_path: Path, template: str | None
) -> None:
    from tokenizers.processors import TemplateProcessing

    tokenizer = tiny_tokenizer()
    tokenizer.bos_token = "<|endoftext|>"
    bos = tokenizer.bos_token_id
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", bos)]
    )
    assert tokenizer("a")["input_ids"][0] == bos
    tokenizer.chat_template = "{{ bos_token }}" + tokenizer.chat_template
    (example,) = build(rows_file(tmp_path, row("yes")), tokenizer=tokenizer, template=template).train
    assert example.input_ids.tolist().count(bos) == 1
    assert example.input_ids[0] == bos
    prompt = prompt_ids(tokenizer, [{"role": "user", "content": "Is it?"}])
    first = int(np.argmax(example.labels != IGNORE))
    assert example.input_ids[:first].tolist() == prompt
    # and transformers' own path, which serving uses, makes the same ids of the saved template
    own = tokenizer.apply_chat_template([{"role": "user", "content": "Is it?"}], add_generation_prompt=True)
    assert list(own["input_ids"]) == prompt


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("architecture", ["llama", "gemma3_text"])
def test_packed_loss_equals_the_separate_losses_in_every_attention(attention: str, architecture: str) -> None:
    model = tiny_model(architecture, attn_implementation=attention)
    assert model.config._attn_implementation == attention
    a, b = (Example(np.array(ids), np.array(ids)) for ids in ([1, 2, 3], [4, 5, 6, 7, 8]))
    with torch.no_grad():
        packed = collate([[a, b]], pad_token_id=3, pad_to_multiple_of=8)
        assert packed.packed
        assert "position_ids" in model_inputs(packed, model)
        together = loss_sum(model, packed)
        apart = [loss_sum(model, collate([[e]], pad_token_id=3)) for e in (a, b)]
    assert together.num_loss_tokens == sum(part.num_loss_tokens for part in apart) == 6
    assert float(together.loss_sum) == pytest.approx(sum(float(part.loss_sum) for part in apart), rel=1e-5)


@pytest.mark.parametrize(
    "change",
    [{"cutoff_len": 24}, {"template": "chatml"}, {"max_samples": 1}, {"mask_history": True}, {"train_on_prompt": True},
     {"default_system": "Be kind"}, {"enable_thinking": False}, {"file": True}, {"tokenizer": True}],
    ids=str,
)  # fmt: skip
def test_cached_tokenisation_is_never_reused_for_a_changed_argument(tmp_path: Path, change: dict[str, Any]) -> None:
    path = rows_file(tmp_path, row("yes" * 9), {**row("no"), "history": [["a", "b"]]})
    first = build(path)
    assert not first.report.datasets[0].cached
    again = build(path)
    assert again.report.datasets[0].cached
    assert again.train.fingerprint == first.train.fingerprint
    tokenizer = tiny_tokenizer()
    change = dict(change)
    if change.pop("file", False):
        path.write_text(path.read_text().replace("no", "NO"))
    if change.pop("tokenizer", False):
        tokenizer.add_special_tokens({"additional_special_tokens": ["<new>"]})
    changed = build(path, tokenizer=tokenizer, **change)
    assert not changed.report.datasets[0].cached
    assert build(path, tokenizer=tokenizer, **change).report.datasets[0].cached
    assert build(path, tokenizer=tokenizer, overwrite_cache=True, **change).report.datasets[0].cached is False
