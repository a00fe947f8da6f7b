"""The C++ cross-entropy against plain torch: odd sizes, chunks, scales, and where it steps aside."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from lumen.kernels import trace
from lumen.kernels.cpu import library
from lumen.objectives.linear_cross_entropy import linear_cross_entropy

pytestmark = pytest.mark.skipif(bool(library.missing()), reason=f"no C++ kernels here: {library.missing()}")


def make(rows: int, size: int, words: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    hidden = torch.randn(rows, size, generator=generator).bfloat16()
    weight = (torch.randn(words, size, generator=generator) * 2 / size**0.5).bfloat16()
    return hidden, weight, torch.randint(0, words, (rows,), generator=generator)


@pytest.mark.parametrize("shape", [(1, 16, 50), (33, 66, 130), (100, 96, 5000), (131, 32, 98)], ids=str)
@pytest.mark.parametrize("scale", [1.0, 0.25])
@pytest.mark.parametrize("chunk", [None, 7])
def test_equals_plain_torch(shape: tuple[int, int, int], scale: float, chunk: int | None) -> None:
    hidden, weight, targets = make(*shape)
    targets[0] = (hidden[0] @ weight.t()).argmax()  # one right answer at least
    low = hidden.clone().requires_grad_()
    with trace() as ran:
        loss, correct = linear_cross_entropy(low, weight, None, targets, scale=scale, rows=chunk)
    assert ran == [("linear_loss", "bf16", "cpu")]
    (loss * 0.5).backward()
    exact = hidden.float().requires_grad_()
    logits = scale * (exact @ weight.float().t())
    wanted = F.cross_entropy(logits, targets, reduction="sum")
    (wanted * 0.5).backward()
    assert torch.allclose(loss, wanted, rtol=2e-3)
    assert abs(int(correct) - int((logits.argmax(1) == targets).sum())) <= 1 and correct >= 1
    assert low.grad is not None and exact.grad is not None
    assert (low.grad.float() - exact.grad).norm() <= 0.008 * exact.grad.norm()


def test_a_trained_head_a_bias_and_odd_words_take_plain_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weight, targets = make(9, 32, 64)
    with trace() as ran:
        linear_cross_entropy(hidden, weight.clone().requires_grad_(), None, targets)
        linear_cross_entropy(hidden, weight, torch.zeros(64, dtype=torch.bfloat16), targets)
        linear_cross_entropy(hidden, weight[:63].contiguous(), None, targets.clamp(max=62))
        linear_cross_entropy(hidden, weight, None, targets, softcap=5.0)
        linear_cross_entropy(hidden.float(), weight.float(), None, targets)
        monkeypatch.setattr(library, "_on", False)
        linear_cross_entropy(hidden, weight, None, targets)
    assert ran == []


def test_large_logits_stay_finite() -> None:
    hidden, weight, targets = make(5, 32, 64)
    low = (hidden * 300).requires_grad_()
    loss, _ = linear_cross_entropy(low, weight, None, targets)
    loss.backward()
    assert low.grad is not None and torch.isfinite(loss) and torch.isfinite(low.grad).all()
    assert torch.allclose(
        loss, F.cross_entropy(low.detach().float() @ weight.float().t(), targets, reduction="sum"), rtol=5e-3
    )
