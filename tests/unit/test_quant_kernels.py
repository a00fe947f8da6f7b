"""The registry and the int8 kernels against their reference."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from lumen.cli.kernels import main
from lumen.core import QuantError
from lumen.formats import QuantSpec, encode
from lumen.kernels import quantize_int8, select, table
from lumen.kernels.int8 import int8_mm
from lumen.kernels.reference import int8 as reference


@pytest.mark.parametrize("m", [0, 1, 17])
@pytest.mark.parametrize("k", [1, 2, 33, 1100])
@pytest.mark.parametrize("n", [1, 8, 65])
@pytest.mark.parametrize("views", [(False, False), (True, False), (False, True), (True, True)])
def test_every_backend_equals_exact_integers(m: int, k: int, n: int, views: tuple[bool, bool]) -> None:
    """Odd shapes and transposed views; torch's own product is wrong at K = 1, which the backend steps around."""
    generator = torch.Generator().manual_seed(m * 1000 + k * 10 + n)

    def codes(rows: int, cols: int, view: bool) -> torch.Tensor:
        shape = (cols, rows) if view else (rows, cols)
        made = torch.randint(-127, 128, shape, dtype=torch.int8, generator=generator)
        return made.t() if view else made

    a, b = codes(m, k, views[0]), codes(k, n, views[1])
    exact = (a.long() @ b.long()).int()
    assert torch.equal(reference.int8_matmul(a, b), exact)
    assert torch.equal(int8_mm(a, b), exact)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("text", ["int8:row", "int8:row:pow2", "int8:tensor"])
def test_fast_quantise_is_the_codec_bit_for_bit(dtype: torch.dtype, text: str) -> None:
    spec = QuantSpec.parse(text)
    x = (torch.randn(33, 70, generator=torch.Generator().manual_seed(0)) * 3).to(dtype)
    x[3] = 0
    x[4] *= 1e-38 if dtype == torch.float32 else 1e-3
    codes, scale = quantize_int8(x, 1 if "row" in text else None, spec.rule)
    want, scales = encode(x, spec)
    assert torch.equal(codes, want) and torch.equal(scale, scales["scale"])
    if "row" in text:
        codes, scale = quantize_int8(x, 0, spec.rule)
        want, scales = encode(x.t(), spec)
        assert torch.equal(codes.t(), want) and torch.equal(scale.t(), scales["scale"])


def test_operator_is_sound() -> None:
    a, b = torch.ones(4, 8, dtype=torch.int8), torch.ones(8, 3, dtype=torch.int8)
    torch.library.opcheck(int8_mm, (a, b), test_utils=("test_schema", "test_faketensor"))


def test_selection_is_by_name_and_never_silent() -> None:
    assert select("int8_matmul", "cpu", "int8").backend == "torch"
    assert select("int8_matmul", "gfx942", "int8").kind == "native"
    assert select("int8_matmul", "gfx1030", "int8").backend == "reference"
    with pytest.raises(QuantError, match="int8_matmul has: torch"):
        select("int8_matmul", "cpu", "e4m3")
    with pytest.raises(QuantError, match=r"operations: attention, .*int8_matmul"):
        select("fp8_matmul", "cpu", "int8")
    assert all(k.why and k.formats and k.targets for k in table())


def test_command_prints_the_table(capsys: Any) -> None:
    assert main(["--target", "gfx942"]) == 0
    assert "int8_matmul" in capsys.readouterr().out
    main(["--json", "--target", "cpu"])
    data = json.loads(capsys.readouterr().out)
    chosen = [k["backend"] for k in data["kernels"] if k["chosen"] and k["op"] == "int8_matmul"]
    assert chosen == ["torch"]


@pytest.mark.parametrize(("flags", "kind"), [({"avx2", "avx512_vnni"}, "native"), ({"avx2", "fma"}, "emulated")])
def test_int8_is_native_only_where_the_cores_have_dot_products(
    flags: set[str], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A report that calls int8 native on any CPU would promise twice the rate on a Zen 3."""
    from lumen.hardware.probe import Cpu, Machine, Memory
    from lumen.kernels import int8, registry

    machine = Machine(Cpu(model="test core", flags=frozenset(flags)), Memory())
    monkeypatch.setattr(int8, "probe", lambda: machine)
    int8._no_dot_products.cache_clear()
    registry._chosen.clear()
    try:
        chosen = select("int8_matmul", "cpu", "int8")
        assert chosen.kind == kind and (kind == "native" or "no faster" in chosen.why)
        model = torch.nn.Sequential(torch.nn.Linear(8, 8))
        from lumen.quant import quantize

        report = quantize(model, "int8")
        assert {g.kind for g in report.layers[0].gemms} == {kind}
    finally:
        int8._no_dot_products.cache_clear()
        registry._chosen.clear()
