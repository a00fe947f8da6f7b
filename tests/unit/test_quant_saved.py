"""What autograd keeps: the codes of a frozen weight, never a dense copy of it.

A framework that keeps the dequantised weight for backward needs 210 GB where 73 would do (mistake 14).  Each of these
fails if `_Products.forward` saves the dense weight, or if LoRA's base product is an ordinary F.linear.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.helpers import tiny_model

from lumen.adapters.config import AdapterConfig
from lumen.adapters.fused import fuse_lora
from lumen.adapters.inject import inject
from lumen.quant import QuantLinear, quantize
from lumen.quant.experts import QuantStack

IDS = torch.arange(5, 22)[None].repeat(2, 1)  # 2 × 17 tokens: no activation has a weight's shape


def qlora(architecture: str, recipe: str, fused: bool) -> Any:
    """A QLoRA model in training mode with start values that let gradients through."""
    sizes = {"vocab_size": 340} if architecture != "gpt2" else {}
    model = tiny_model(architecture, dtype=torch.bfloat16, **sizes)
    quantize(model, recipe, frozen=True)
    model = inject(model, AdapterConfig(lora_rank=4, lora_target=["all"])).train()
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.02)
    if fused:
        assert fuse_lora(model).fused > 0
    return model


def frozen_shapes(model: Any) -> set[tuple[int, ...]]:
    """Shapes in which a copy of a quantised weight could lie: either way round, flat, stacked."""
    shapes: set[tuple[int, ...]] = set()
    for m in model.modules():
        if isinstance(m, (QuantLinear, QuantStack)):
            n, k = m.out_features, m.in_features
            shapes |= {(n, k), (k, n), (n * k,)}
            if isinstance(m, QuantStack):
                shapes |= {(m.num_experts, n, k), (m.num_experts, k, n), (m.num_experts * n * k,)}
    return shapes


@pytest.mark.parametrize("checkpointing", [None, "reentrant", "plain"])
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize(
    ("architecture", "recipe"),
    [("llama", "nf4"), ("llama", "int8"), ("llama", "mxfp8"), ("gpt2", "nf4"), ("mixtral", "nf4")],
)
def test_no_dense_copy_of_a_frozen_weight_is_saved(
    architecture: str, recipe: str, fused: bool, checkpointing: str | None
) -> None:
    model = qlora(architecture, recipe, fused)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": checkpointing == "reentrant"})
        model.enable_input_require_grads()
    forbidden = frozen_shapes(model)
    saved: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    trainable = {id(p) for p in model.parameters() if p.requires_grad}
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(input_ids=IDS, labels=IDS).loss
        loss.backward()
    assert saved and any(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters() if p.requires_grad)
    dense = [
        tuple(t.shape)
        for t in saved
        if t.is_floating_point() and t.dtype.itemsize > 1 and tuple(t.shape) in forbidden and id(t) not in trainable
    ]
    assert not dense, f"dense copies were kept: {dense}"
    kept = {t.untyped_storage().data_ptr() for t in saved}
    codes = {
        m._parameters["weight"].untyped_storage().data_ptr()
        for m in model.modules()
        if isinstance(m, (QuantLinear, QuantStack))
    }
    if not checkpointing:  # the codes themselves, no copy of them
        assert len(codes & kept) > len(codes) / 2


def test_the_count_would_see_a_dense_copy() -> None:
    """The same count on the dequantised model finds the weights: the test above can fail."""
    from lumen.quant import dequantize

    model = qlora("llama", "nf4", fused=False)
    forbidden = frozen_shapes(model)
    dequantize(model)
    seen: list[tuple[int, ...]] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        seen.append(tuple(tensor.shape))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(input_ids=IDS, labels=IDS).loss.backward()
    assert forbidden & set(seen)
