"""The three GEMMs of every recipe against fp64: no product is worse than its two operands make it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lumen.bench.numerics import gemms
from lumen.bench.numerics.lines import product_lines


@pytest.mark.parametrize("recipe", gemms.ready())
def test_gemms_reach_the_bound_of_their_operands(recipe: str) -> None:
    lines = product_lines(recipe, gemms.QUICK_LENGTHS)
    assert lines and all(line.ok for line in lines), [f"{line.name}: {line.got} ({line.note})" for line in lines]


def test_ones_hide_what_a_random_gradient_shows() -> None:
    """Why dY is random: all ones are exact in every format, so an error of dY's quantisation would not be seen."""
    from lumen.quant import quantize

    def error(dy: torch.Tensor) -> float:
        box = nn.Sequential(nn.Linear(64, 48, bias=False))
        quantize(box, {"grad_output": "e5m2:row"})
        x = torch.randn(32, 64, requires_grad=True)
        box(x).backward(dy)
        want = dy.double() @ box[0].weight.detach().double()
        assert x.grad is not None
        return float((x.grad - want).norm() / want.norm())

    assert error(torch.ones(32, 48)) < 1e-6 and error(torch.randn(32, 48)) > 0.03


def test_a_wrong_scale_falls_below_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    from lumen.quant import gemm

    original = gemm.decode_operand

    def wrong(parts: gemm.Codes, *rest: object) -> torch.Tensor:
        return original((parts[0], parts[1] * 1.3), *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(gemm, "decode_operand", wrong)
    assert not all(line.ok for line in product_lines("fp8", gemms.QUICK_LENGTHS))
