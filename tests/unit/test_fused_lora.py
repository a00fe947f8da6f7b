"""The fused LoRA forward against PEFT's own."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from tests.helpers.tiny import tiny_llama
from torch import Tensor

from lumen.adapters.fused import FusedLoraLinear, fuse_lora

IDS = torch.arange(2 * 17).view(2, 17) * 7 % 300


def adapted(dtype: torch.dtype = torch.float32, **settings: object) -> PeftModel:
    torch.manual_seed(1)
    model = get_peft_model(
        tiny_llama(dtype=dtype),
        LoraConfig(r=4, lora_alpha=6, target_modules="all-linear", task_type="CAUSAL_LM", **settings),
    )
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.05)
    return model.train()


def loss_and_gradients(model: PeftModel) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    torch.manual_seed(5)
    loss = model(input_ids=IDS, labels=IDS, use_cache=False).loss
    loss.backward()
    return loss.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("settings", [{}, {"use_rslora": True}], ids=["plain", "rslora"])
def test_fp32_equals_peft(settings: dict[str, object]) -> None:
    model = adapted(**settings)
    expected, expected_grads = loss_and_gradients(model)
    report = fuse_lora(model)
    assert report.fused == 14 and not report.kept
    loss, grads = loss_and_gradients(model)
    assert torch.allclose(loss, expected, rtol=1e-6)
    assert grads.keys() == expected_grads.keys()
    for name in grads:
        assert torch.allclose(grads[name], expected_grads[name], rtol=1e-4, atol=1e-7), name


def test_bf16_is_as_near_to_fp32_as_peft_is() -> None:
    """The fused bf16 gradients may not be noisier than PEFT's, measured against the same model in fp32."""
    model = adapted(torch.bfloat16)
    reference = copy.deepcopy(model).float()
    _, exact = loss_and_gradients(reference)
    _, by_peft = loss_and_gradients(model)
    fuse_lora(model)
    _, fused = loss_and_gradients(model)
    assert all(g.dtype == torch.float32 for g in fused.values())

    def distance(grads: dict[str, Tensor]) -> float:
        gap = sum((grads[n] - exact[n]).square().sum() for n in exact)
        return float((gap / sum(g.square().sum() for g in exact.values())).sqrt())

    assert distance(fused) < max(1.3 * distance(by_peft), 0.02)


@pytest.mark.parametrize(
    ("settings", "reason"), [({"lora_dropout": 0.1}, "dropout"), ({"use_dora": True}, "Dora")], ids=["dropout", "dora"]
)
def test_what_is_not_plain_runs_pefts_forward(settings: dict[str, object], reason: str) -> None:
    model = adapted(**settings)
    expected, _ = loss_and_gradients(model)
    report = fuse_lora(model)
    assert report.fused == 0 and report.kept == {reason: 14} and reason in str(report)
    assert torch.equal(loss_and_gradients(model)[0], expected)


def test_disabling_merging_and_a_second_adapter_after_fusing() -> None:
    model = adapted()
    fuse_lora(model)
    logits = model(input_ids=IDS).logits
    with model.disable_adapter():
        assert torch.allclose(model(input_ids=IDS).logits, tiny_llama()(input_ids=IDS).logits, atol=1e-6)
    model.merge_adapter()
    assert torch.allclose(model(input_ids=IDS).logits, logits, atol=1e-5)
    model.unmerge_adapter()
    model.add_adapter("other", LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False))
    model.base_model.set_adapter(["default", "other"])
    both = model(input_ids=IDS).logits
    assert not torch.allclose(both, logits, atol=1e-4)
    model.set_adapter("default")
    assert torch.allclose(model(input_ids=IDS).logits, logits, atol=1e-5)


def test_keys_files_and_undo(tmp_path: Path) -> None:
    model = adapted()
    keys = list(model.state_dict())
    report = fuse_lora(model)
    assert fuse_lora(model).fused == 14
    assert list(model.state_dict()) == keys
    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(tiny_llama(), tmp_path)
    model.eval()
    assert torch.allclose(loaded(input_ids=IDS).logits, model(input_ids=IDS).logits, atol=1e-5)
    assert any(isinstance(m, FusedLoraLinear) for m in model.modules())
    report.undo()
    assert not any(isinstance(m, FusedLoraLinear) for m in model.modules())
