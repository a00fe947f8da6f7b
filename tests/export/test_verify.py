"""The proof beside every export: KL, perplexity, held-out rows."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers import run_config, save_tiny, tiny_llama, tiny_tokenizer, write_rows

from lumen.cli.main import run
from lumen.core import ModelError
from lumen.export.merge import MergeConfig
from lumen.export.rows import Rows, bundled_text, calibration_rows, verification_rows
from lumen.export.verify import Reference


def rows(count: int = 3, length: int = 9) -> Rows:
    generator = torch.Generator().manual_seed(0)
    ids = [torch.randint(4, 300, (length,), generator=generator) for _ in range(count)]
    return Rows("random", ids, [torch.arange(length) > 2 for _ in ids])


def test_kl_and_perplexity_are_those_of_their_definitions(tmp_path: Path) -> None:
    source, other = tiny_llama(), tiny_llama(seed=1)
    found = Reference(source, rows(), tmp_path).compare(other, 100.0)
    kl, nll, same = [], [], []
    with torch.no_grad():
        for ids in rows().ids:
            p, q = (m(ids[None]).logits[0].double().log_softmax(-1) for m in (source, other))
            for t in range(2, len(ids) - 1):  # the prediction of token t + 1, which is scored from 3 on
                kl.append(float(sum(math.exp(p[t, v]) * (p[t, v] - q[t, v]) for v in range(p.shape[1]))))
                nll.append(-float(q[t, ids[t + 1]]))
                same.append(int(p[t].argmax() == q[t].argmax()))
    assert found.tokens == len(kl) == 18
    assert found.kl == pytest.approx(sum(kl) / len(kl), rel=1e-4) and found.kl_max == pytest.approx(max(kl), rel=1e-4)
    assert found.perplexity == pytest.approx(math.exp(sum(nll) / len(nll)), rel=1e-4)
    assert found.agreement == pytest.approx(sum(same) / len(same))
    equal = Reference(source, rows(), tmp_path).compare(source, 0.0)
    assert equal.kl == 0 and equal.agreement == 1 and equal.perplexity == equal.perplexity_source
    equal.check()
    found.limit = found.kl / 2
    with pytest.raises(ModelError, match="does not answer like its source"):
        found.check()


def test_a_broken_export_never_passes(tmp_path: Path) -> None:
    source, broken = tiny_llama(), tiny_llama()
    broken.model.norm.weight.data.fill_(math.nan)
    with pytest.raises(ModelError, match="nan"):
        Reference(source, rows(), tmp_path).compare(broken, 1e9).check()


def config(tmp_path: Path, **keys: Any) -> MergeConfig:
    return MergeConfig(model_name_or_path=str(tmp_path / "base"), export_dir=str(tmp_path / "out"), **keys)


def test_rows_of_a_text_file_and_of_chat_rows(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    (tmp_path / "text.txt").write_text("one two three four five " * 200)
    found = verification_rows(config(tmp_path, export_verify_data=str(tmp_path / "text.txt")), tokenizer)
    assert all(len(row) <= 512 for row in found.ids) and len(found.ids) > 1
    assert found.tokens == sum(len(row) - 1 for row in found.ids)
    few = verification_rows(
        config(tmp_path, export_verify_data=str(tmp_path / "text.txt"), export_verify_tokens=70), tokenizer
    )
    assert few.tokens == 70
    file = write_rows(tmp_path / "rows.jsonl", 4)
    chat = verification_rows(config(tmp_path, export_verify_data=str(file)), tokenizer)
    assert len(chat.ids) == 4 and 0 < chat.tokens < sum(map(len, chat.ids)), "only the answers count"


def test_the_configurations_held_out_rows_come_first(tmp_path: Path) -> None:
    held = write_rows(tmp_path / "held.jsonl", 3, start=90)
    run_ = run_config(tmp_path, eval_dataset=[str(held)])
    values = {k: getattr(run_, k) for k in MergeConfig.model_fields if hasattr(run_, k)}
    found = verification_rows(MergeConfig(**values, export_dir="x"), tiny_tokenizer())
    assert found.name == "held.jsonl" and len(found.ids) == 3
    trained_on = calibration_rows(MergeConfig(**values, export_dir="x"), tiny_tokenizer())
    assert trained_on.name == "rows.jsonl"


def test_a_runs_own_held_out_set_is_found_beside_its_adapter(tmp_path: Path) -> None:
    from lumen.config.schema import dump
    from lumen.trainer.train import run_training

    held = write_rows(tmp_path / "held.jsonl", 3, start=90)
    settings = run_config(tmp_path, eval_dataset=[str(held)], max_steps=1, save_strategy="no")
    run_training(settings, resolved=json.dumps(dump(settings)))
    found = verification_rows(
        config(tmp_path, adapter_name_or_path=str(tmp_path / "out"), export_format="int8"), tiny_tokenizer()
    )
    assert "held.jsonl of out" in found.name and len(found.ids) == 3


def test_bundled_texts_differ_and_are_long_enough(tmp_path: Path) -> None:
    held, calibration = bundled_text("held_out"), bundled_text("calibration")
    assert len(held) > 4000 and len(calibration) > 3000
    assert not set(held.splitlines()) & set(calibration.splitlines()) - {""}
    found = verification_rows(config(tmp_path), tiny_tokenizer())
    assert "Lumen" in found.name and found.tokens > 1000


def test_llama_factorys_merge_file_gives_a_verified_directory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_tiny(tmp_path / "base")
    (tmp_path / "base" / "README.md").write_text("---\nlicense: apache-2.0\n---\n")
    (tmp_path / "merge.yaml").write_text(
        f"model_name_or_path: {tmp_path}/base\ntemplate: chatml\ntrust_remote_code: true\n"
        f"export_dir: {tmp_path}/out\nexport_size: 5\nexport_device: cpu\nexport_legacy_format: false\n"
    )
    assert run(["export", str(tmp_path / "merge.yaml"), "export_verify_tokens=40"]) == 0
    printed = capsys.readouterr().out
    report = json.loads((tmp_path / "out" / "export.json").read_text())
    assert report["verification"]["kl"] == 0 and report["license"] == "apache-2.0" and report["format"] == "hf"
    assert "mean KL 0.00e+00" in printed and "licence: apache-2.0" in printed and "vllm serve" in printed
    first = (tmp_path / "out" / "export.json").read_text()
    assert run(["export", str(tmp_path / "merge.yaml"), "--no-verify"]) == 0, "an export may be written again"
    assert (tmp_path / "out" / "export.json").read_text() != first
