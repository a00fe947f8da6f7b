"""Which chip a policy is for: the dialect of its operands, and the table of what runs natively, for every chip."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from tests.helpers import tiny_llama

from lumen.cli.kernels import main as kernels
from lumen.core.errors import HardwareError, QuantError
from lumen.formats.floats import GRIDS, fnuz_to_ocp, ocp_to_fnuz
from lumen.hardware import CHIPS
from lumen.quant import QuantLinear, quantize, recipes
from lumen.quant.report import recipe_rows

READY = [name for name, why in recipes.available().items() if not why and name != "bf16"]
IDS = torch.arange(5, 29).reshape(2, 12)

# What each code target multiplies, as published (AMD's and NVIDIA's tables), and what torch's integer product reaches.
FP8 = {"gfx942": "fnuz", "gfx950": "ocp", "gfx1200": "ocp", "gfx1201": "ocp"} | dict.fromkeys(
    ("sm_89", "sm_90", "sm_100", "sm_120"), "ocp"
)
MX = {"gfx950", "sm_100", "sm_120"}
INT8_WITHOUT_TORCH = {"gfx908", "gfx1030", "gfx1031", "gfx1032", "gfx1035", "gfx1036"}
ALL_LOW = {
    "int8": {"int8", "int8-backward", "int8-smooth"},
    "fp8": {"fp8", "fp8-delayed", "fp8-rowwise", "fp8-blockwise"},
    "mx": {"mxfp8", "mxfp4"},
    "none": {"bitnet"},
}
"""Recipes by the units that their products with two low operands want."""


def wanted(recipe: str, arch: str) -> str:
    """native, fallback or emulated for products with two low operands."""
    kind = next(kind for kind, names in ALL_LOW.items() if recipe in names)
    if kind == "int8":
        return "fallback" if arch in INT8_WITHOUT_TORCH else "native"
    there = {"fp8": arch in FP8, "mx": arch in MX, "none": False}[kind]
    return "fallback" if there else "emulated"  # no kernel of this version drives these units yet


@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("chip", CHIPS, ids=lambda chip: chip.name)
def test_table_of_every_chip(chip: Any, frozen: bool) -> None:
    """Recipe by recipe: what two low operands run as, one low operand dequantised, and nothing called native else."""
    rows = {row["recipe"]: row for row in recipe_rows(chip.name, frozen=frozen)}
    assert set(rows) == set(recipes.available())
    for recipe in READY:
        row = rows[recipe]
        for gemm in ("forward", "dgrad") if frozen else ("forward", "dgrad", "wgrad"):
            left, right = row[f"{gemm} operands"].split(" × ")
            if "none" not in (left, right):
                assert row[gemm] == wanted(recipe, chip.arch), (recipe, gemm, row)
            elif left == right:
                assert row[gemm] in ("none", "dequantised"), (recipe, gemm, row)
            else:
                assert row[gemm] == "dequantised", (recipe, gemm, row)
            dialect = "fnuz" if chip.arch == "gfx942" else "ocp"
            for operand, stored in ((left, False), (right, frozen and gemm != "wgrad")):
                if operand.startswith(("e4m3", "e5m2")):
                    assert operand.endswith("+fnuz") == (dialect == "fnuz" and not stored), (recipe, gemm, row)
        assert "fnuz" not in row["stored"]


@pytest.mark.parametrize("target", ["gfx942", "gfx950", "MI300X", "sm_90", "cpu"])
def test_a_models_report_is_the_table(target: str) -> None:
    """`quantize(..., target=…)` on a CPU says for each module and product what `lumen kernels` says for the recipe."""
    rows = {row["recipe"]: row for row in recipe_rows(target, frozen=False)}
    for recipe in ("int8", "fp8", "mxfp8", "nf4"):
        report = quantize(tiny_llama(), recipe, target=target)
        assert report.target == ("gfx942" if target == "MI300X" else target) and len(report.layers) == 14
        for layer in report.layers:
            assert {g.gemm: g.kind for g in layer.gemms} == {g: rows[recipe][g] for g in ("forward", "dgrad", "wgrad")}
            assert all(g.why for g in layer.gemms)


def test_unknown_targets_and_stored_fnuz_are_refused_before_anything_changes() -> None:
    model = tiny_llama()
    with pytest.raises(HardwareError, match="gfx943"):
        quantize(model, "fp8", target="gfx943")
    with pytest.raises(HardwareError, match="MI300"):
        quantize(model, {"recipe": "fp8", "target": "MI301"})
    with pytest.raises(QuantError, match="stored in OCP"):
        quantize(model, {"weight": "e4m3+fnuz"}, frozen=True)
    assert not any(isinstance(m, QuantLinear) for m in model.modules())


def test_operands_of_gfx942_are_fnuz_and_stored_codes_are_not() -> None:
    """The dtypes that ran, seen where operands are made; the stored bytes are those of every other chip."""
    from lumen.quant import gemm

    made: list[torch.dtype] = []
    encode = gemm.encode_operand

    def spy(*args: Any, **kwargs: Any) -> Any:
        parts = encode(*args, **kwargs)
        made.append(parts[0].dtype)
        return parts

    states, dtypes = {}, {}
    for target in ("gfx942", "gfx950", "cpu"):
        for frozen in (False, True):
            model = tiny_llama()
            quantize(model, "fp8", frozen=frozen, target=target)
            made.clear()
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(gemm, "encode_operand", spy)
                logits = model(input_ids=IDS).logits
                logits.backward(torch.randn(logits.shape))
            dtypes[target, frozen] = set(made)
            states[target, frozen] = model.state_dict()
    fnuz = {torch.float8_e4m3fnuz, torch.float8_e5m2fnuz}
    assert dtypes["gfx942", False] == dtypes["gfx942", True] == fnuz
    assert dtypes["cpu", False] == dtypes["gfx950", False] == {torch.float8_e4m3fn, torch.float8_e5m2}
    for target in ("gfx942", "gfx950"):
        for name, tensor in states[target, True].items():
            other = states["cpu", True][name]
            assert tensor.dtype == other.dtype and "fnuz" not in str(tensor.dtype), name
            assert torch.equal(tensor.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8)), name


@pytest.mark.parametrize("element", ["e4m3", "e5m2"])
def test_every_stored_code_is_read_exactly_by_gfx942(element: str) -> None:
    """All 256 bit patterns: same bits, twice the scale, same value; 0x80 becomes 0x00; NaN and infinity trap."""
    ocp, fnuz = GRIDS[element, "ocp"], GRIDS[element, "fnuz"]
    codes = torch.arange(256, dtype=torch.uint8).view(ocp.dtype)
    finite = torch.isfinite(codes.float())
    assert (~finite).sum() == (2 if element == "e4m3" else 8)
    scale = torch.tensor(0.25)
    read, doubled = ocp_to_fnuz(codes[finite], scale)
    assert read.dtype == fnuz.dtype and doubled == 0.5
    assert torch.equal(read.float() * doubled, codes[finite].float() * scale)
    bits = read.view(torch.uint8)
    assert bits[codes[finite].view(torch.uint8) == 0x80] == 0 and not (bits == 0x80).any()
    for bad in codes[~finite].view(torch.uint8):
        with pytest.raises(QuantError, match="NaN or infinity"):
            ocp_to_fnuz(bad.reshape(1).view(ocp.dtype), scale)
    back, halved = fnuz_to_ocp(read, doubled)
    assert halved == scale and torch.equal(back.float(), codes[finite].float())
    with pytest.raises(QuantError, match="no OCP twin"):
        fnuz_to_ocp(torch.tensor([0x80], dtype=torch.uint8).view(fnuz.dtype), scale)
    if element == "e4m3":  # 240 in FNUZ, NaN in OCP: why codes are stored in OCP and not the other way round
        with pytest.raises(QuantError, match="no OCP twin"):
            fnuz_to_ocp(torch.tensor([0x7F], dtype=torch.uint8).view(fnuz.dtype), scale)


def test_commands(capsys: Any) -> None:
    assert kernels(["--target", "MI300X"]) == 0
    text = capsys.readouterr().out
    assert "recipes on gfx942" in text and "gfx942 multiplies fp8, but no kernel of this version does" in text
    assert kernels(["--target", "RX 7900 XTX", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    fp8 = next(row for row in told["recipes"]["trained"] if row["recipe"] == "fp8")
    assert told["target"] == "gfx1100" and fp8["forward"] == "emulated" and "no units" in fp8["forward why"]


def test_dry_run_reports_for_another_chip(tmp_path: Any, capsys: Any) -> None:
    """`lumen train FILE --dry-run --target MI300X`, also where the file gives the recipe by its name alone."""
    import yaml
    from tests.helpers import run_values

    from lumen.cli.main import run as command

    values = {**run_values(tmp_path), "quant": "fp8"}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(values))
    assert command(["train", str(tmp_path / "run.yaml"), "--dry-run", "--target", "MI300X"]) == 0
    text = capsys.readouterr().out
    assert "recipe fp8 on gfx942" in text and "+fnuz × e4m3:tensor:absmax: fallback" in text
    assert command(["train", str(tmp_path / "run.yaml"), "--dry-run", "--target", "MI301"]) == 2
    assert "MI300X" in capsys.readouterr().err
