"""The loss-gap table in small: the independent implementation is independent, and every case runs and compares."""

from __future__ import annotations

import ast
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from tests.helpers.tiny import tiny_llama

import lumen.bench.loss_gap.independent as independent
from lumen.bench.loss_gap import cells, operands, plain_formats, table, train
from lumen.bench.loss_gap.bases import Base, Settings, fingerprint
from lumen.bench.loss_gap.cases import NOT_COMPARED, Case, cases
from lumen.formats import QuantSpec, decode, encode
from lumen.quant import gemm

READY, MISSING = cases()
NAMES = [c.name for c in READY if c.name not in NOT_COMPARED]


def tiny_base(lora: bool, name: str = "tiny") -> Base:
    model = tiny_llama(
        hidden_size=64,
        intermediate_size=160,
        head_dim=16,
        num_hidden_layers=1,
        dtype=torch.bfloat16 if lora else torch.float32,
    )
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(4, 300, (28, 24), generator=generator)
    settings = Settings(rows=16, batch=4, learning_rate=2e-3, warmup_steps=1, held_out=8, lora_rank=4 if lora else 0)

    return Base(name, settings, lambda: deepcopy(model), ids, ids.clone(), fingerprint(ids), autocast=not lora)


def test_yardstick_imports_nothing_of_what_it_measures():
    for module in (independent, plain_formats):
        for node in ast.walk(ast.parse(Path(module.__file__).read_text(encoding="utf-8"))):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) else []
            ours = [n for n in names if n.startswith("lumen") and "bench.loss_gap" not in n]
            assert not ours and "lumen.bench.loss_gap.train" not in names, names


def test_every_case_has_an_independent_implementation():
    assert [c.name for c in READY if not independent.has_scheme(c.name)] == []


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("case", [c for c in READY if c.name in NAMES], ids=lambda c: c.slug)
def test_operands_of_three_steps_are_bit_equal(case, lora):
    found = operands.compare(tiny_base(lora), case)
    assert found["equal"], found
    # 3 steps of 7 linear layers; behind frozen embeddings q, k and v need no dgrad
    assert found["operands"][1] == (3 * (7 + 4) * 2 if lora else 3 * 7 * 6)


def test_another_scheme_is_found():
    found = operands.compare(tiny_base(False), Case("int8", {"recipe": "fp8-rowwise"}))
    assert not found["equal"] and len(found["unequal"]) == 6


def test_a_layer_that_does_not_do_what_its_plan_says_is_found(monkeypatch):
    """Breaks ours: wgrad's output gradient keeps dgrad's scales, as if they survived a transpose."""
    spec = QuantSpec.parse("int8:row")

    def broken(dy, x, plan, dtype, *rest):
        once = decode(*encode(dy, spec), spec, dy.shape).to(dy.dtype)
        return honest(once, x, plan, dtype, *rest)

    honest = gemm.wgrad_gemm
    monkeypatch.setattr(gemm, "wgrad_gemm", broken)
    found = operands.compare(tiny_base(False), next(c for c in READY if c.name == "int8"))
    assert not found["equal"] and not found["unequal"] and found["difference"] > 0.1


def small_table(folder: Path, base: Base, *names: str) -> tuple[cells.Results, list]:
    chosen = [c for c in READY if c.name in names]
    return cells.Results(folder, {"B": lambda: base}), chosen


def run_all(results: cells.Results, chosen: list) -> list[str]:
    done = []
    for _, cell in cells.outstanding(results, ["B"], chosen):
        results.run(cell, next((c for c in chosen if c.name == cell.case), None))
        done.append(cell.file)
    return done


def test_table_in_small(tmp_path):
    """int8 (three seeds on B) and one single role (one seed, as its operands are bit-equal), from cells to verdicts."""
    base = tiny_base(False, "B")
    results, chosen = small_table(tmp_path, base, "int8", "fp8 gradients")
    done = run_all(results, chosen)
    assert len(done) == len(set(done)) == 2 + 3 + 2 * 3 + 2
    one, role = (table.row(results, "B", c) for c in chosen)
    assert (one.done, one.seeds, role.done, role.seeds) == (3, 3, 1, 1)
    assert one.same_order and one.interval[0] <= one.ours <= one.interval[1]
    # the same arithmetic: the same training to within the order of sums
    assert abs(one.away) < 0.05 and abs(role.away) < 0.01, (one, role)
    assert one.ours != 0.0  # quantisation did something
    text = table.markdown(results, ["B"], chosen, MISSING)
    assert "bit-equal (126)" in text and "| int8 | 16 × 3 |" in text
    # interrupted: a lost cell is measured again, with the same result; nothing else is
    cell = cells.Cell("B", "fp8 gradients", "ours", 0, 16)
    before = results.get(cell)
    (tmp_path / cell.file).unlink()
    assert run_all(results, chosen) == [cell.file]
    assert results.get(cell)["quantised"] == before["quantised"]


def test_cells_of_another_base_do_not_count(tmp_path):
    """Breaks when results are taken for a base or settings that they were not measured on."""
    base = tiny_base(False, "B")
    results, chosen = small_table(tmp_path, base, "fp8 gradients")
    run_all(results, chosen)
    changed = tiny_base(False, "B")
    changed.fingerprint = "another"
    again, _ = small_table(tmp_path, changed, "fp8 gradients")
    assert len(list(cells.outstanding(again, ["B"], chosen))) == 4 - 1 + 3 * 3 - 2  # operands unknown: three seeds
    assert table.row(again, "B", chosen[0]).ours is None
    shown = cells.Results(tmp_path, None)  # --table shows what is stored, without the base
    assert shown.get(cells.Cell("B", "fp8 gradients", "ours", 0, 16)) is not None


def test_verdicts():
    bad = table.Row("B", "int8", 16, 3, 3, 3, ours=0.6, interval=(0.5, 0.7), independent=0.3)
    assert len(bad.failures) == 2
    assert table.Row("A", "int8", 16, 3, 3, 3, ours=0.6, interval=(0.5, 0.7), independent=0.4).failures == []
    assert table.Row("B", "nf4", 16, 3, 3, 3, ours=9.0, independent=9.0, same_order=False).failures == [
        "rows in another order than bf16's"
    ]


def test_seeds_change_the_order_and_not_the_rows():
    base = tiny_base(False)
    one, two = train.order_of(base, 16, 0), train.order_of(base, 16, 1)
    assert one.tolist() != two.tolist() and sorted(one.tolist()) == sorted(two.tolist())
    assert one.tolist() == train.order_of(base, 16, 0).tolist() and int(one.max()) < base.pool


@pytest.mark.parametrize("case", [c for c in READY if c.name in NOT_COMPARED], ids=lambda c: c.slug)
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_other_cases_train_like_the_independent_ones(case, lora):
    """No bit-equality to be had: the losses of a few steps stay near each other and near bf16's."""
    base = tiny_base(lora)
    kinds = {"ours": case, "independent": case, "bf16": None}
    losses = {k: train.run(base, c, k, seed=0, rows=16)["train_loss"] for k, c in kinds.items()}
    for ours, theirs, plain in zip(losses["ours"], losses["independent"], losses["bf16"], strict=True):
        assert ours == pytest.approx(theirs, rel=0.02) and ours == pytest.approx(plain, rel=0.05)


def test_a_row_without_all_seeds_of_both_implementations_does_not_hold() -> None:
    """mxfp4 with one seed of ours and none of the independent implementation was once printed as `holds`."""
    whole = table.Row("B", "mxfp4", 16, 3, 3, 3, ours=0.1, interval=(0.0, 0.2), independent=0.1)
    assert table._line(whole).endswith("| holds |")
    for done, theirs in ((1, 0), (3, 2), (2, 3)):
        part = table.Row("B", "mxfp4", 16, 3, done, theirs, ours=0.1, interval=(0.0, 0.2), independent=0.1)
        assert table._line(part).endswith("| incomplete |")
