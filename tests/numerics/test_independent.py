"""Bit for bit against implementations that we did not write: bitsandbytes, torch, torchao, gguf.

The comparisons are those of `lumen bench numerics`.  The packages are in the dev extra; where one is not installed its
comparisons skip with the reason.
"""

from __future__ import annotations

import pytest
import torch

from lumen.bench.numerics.equality import Comparison, comparisons, differing, total, version
from lumen.bench.numerics.peer_gguf import gguf_blocks
from lumen.formats import QuantSpec, encode


@pytest.mark.parametrize("comparison", comparisons(), ids=lambda comparison: comparison.id)
def test_bit_equal(comparison: Comparison) -> None:
    if not version(comparison.package):
        pytest.skip(f"{comparison.package} is not installed (pip install --no-deps {comparison.package})")
    unequal, compared = comparison.run()
    assert compared > 0 and unequal == 0, f"{unequal} of {compared} differ"


def test_what_counts_as_different() -> None:
    a = torch.tensor([0.0, 1.0, float("nan"), 2.0])
    assert differing(a, torch.tensor([-0.0, 1.0, float("nan"), 2.0])) == (0, 4)
    assert differing(a, torch.tensor([0.0, float("nan"), 3.0, 2.5])) == (3, 4)
    assert differing(a, a[:2]) == (4, 4)
    assert differing(torch.tensor([1], dtype=torch.uint8), torch.tensor([2], dtype=torch.uint8)) == (1, 1)
    assert total((1, 4), (0, 6)) == (1, 10)


def test_q4_0_of_bf16_weights_rounds_in_fp32() -> None:
    """bf16 values over a bf16 scale meet ties of x/d + 8.5 often: a wider product than fp32 took other codes there."""
    x = torch.tensor([-1.0625, -0.99609375, -0.86328125, -0.73046875]).repeat(8)[None]
    codes, scales = encode(x.bfloat16(), QuantSpec.parse("q4_0"))
    d = torch.tensor(-1.0625) / -8
    want = torch.trunc(x * (1 / d) + 8.5)[0].to(torch.uint8)
    assert torch.equal(gguf_blocks(codes, scales, QuantSpec.parse("q4_0"))[0, 2:], want[:16] | (want[16:] << 4))
