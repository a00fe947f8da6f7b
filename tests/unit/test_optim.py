"""AdamW equals torch's; groups equal HF's; masters and stochastic rounding do what they promise."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lumen.core.errors import CheckpointError, ConfigError
from lumen.kernels.reference.optimizer import adamw_step, stochastic_round_bf16
from lumen.optim import AdamW, clip_factor, grad_norm, make_optimizer, parameter_groups, scale_grads
from lumen.optim.groups import undecayed_names


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 5)
        self.norm = nn.LayerNorm(5)
        self.rare = nn.Linear(5, 5, bias=False)
        self.last = nn.Linear(5, 3, bias=False)

    def forward(self, x: torch.Tensor, use_rare: bool) -> torch.Tensor:
        x = self.norm(self.first(x))
        return self.last(self.rare(x) if use_rare else x)


def twin_models(dtype: torch.dtype = torch.float32) -> tuple[Small, Small]:
    torch.manual_seed(0)
    ours = Small().to(dtype)
    theirs = Small().to(dtype)
    theirs.load_state_dict(ours.state_dict())
    return ours, theirs


def test_adamw_equals_torch_also_where_a_parameter_is_used_rarely() -> None:
    ours, theirs = twin_models()
    options = {"lr": 3e-3, "betas": (0.8, 0.95), "eps": 1e-7}
    optimizer = AdamW(parameter_groups(ours, lr=3e-3, weight_decay=0.1), weight_decay=0.1, **options)
    undecayed = undecayed_names(theirs)
    reference = torch.optim.AdamW(
        [
            {"params": [p for n, p in theirs.named_parameters() if n not in undecayed], "weight_decay": 0.1},
            {"params": [p for n, p in theirs.named_parameters() if n in undecayed], "weight_decay": 0.0},
        ],
        **options,
    )
    for step in range(12):
        x = torch.randn(4, 7)
        for model, opt in ((ours, optimizer), (theirs, reference)):
            opt.zero_grad()
            model(x, use_rare=step % 3 == 2).square().sum().backward()
            opt.step()
    for (name, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7, msg=name)


def test_functional_step_by_hand() -> None:
    param, grad = torch.tensor([1.0, -2.0]), torch.tensor([0.5, 0.25])
    m, v = torch.zeros(2), torch.zeros(2)
    adamw_step(param, grad, m, v, lr=0.1, beta1=0.9, beta2=0.99, eps=0.0, weight_decay=0.5, step=1)
    # first step: the corrected ratio is sign(g); decay multiplies by 1 - 0.1 * 0.5
    torch.testing.assert_close(param, torch.tensor([1 * 0.95 - 0.1, -2 * 0.95 - 0.1]))
    torch.testing.assert_close(m, 0.1 * grad)


def test_undecayed_parameters_are_those_of_hf_trainer() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Trainer

    common = {
        "vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }  # fmt: skip
    for model in (LlamaForCausalLM(LlamaConfig(**common)), Qwen2ForCausalLM(Qwen2Config(**common))):
        decayed = set(Trainer.get_decay_parameter_names(None, model))  # type: ignore[arg-type]
        ours = {n for n, _ in model.named_parameters()} - undecayed_names(model)
        assert ours == decayed


def test_loraplus_rates() -> None:
    model = nn.ModuleDict({"lora_A": nn.Linear(2, 2, bias=False), "lora_B": nn.Linear(2, 2, bias=False)})
    groups = parameter_groups(model, lr=1e-3, weight_decay=0.0, loraplus_lr_ratio=16.0)
    rates = {name: group["lr"] for group in groups for name, _ in group["named_params"]}
    assert rates == {"lora_A.weight": 1e-3, "lora_B.weight": pytest.approx(1.6e-2)}


def test_nothing_trainable_is_said() -> None:
    model = nn.Linear(2, 2).requires_grad_(False)
    with pytest.raises(ConfigError, match="nothing is trainable"):
        parameter_groups(model, lr=1.0, weight_decay=0.0)


def one_weight(master: str) -> tuple[nn.Linear, AdamW]:
    layer = nn.Linear(256, 16, bias=False).to(torch.bfloat16)
    with torch.no_grad():
        layer.weight.fill_(1.0)
    groups = parameter_groups(layer, lr=1e-4, weight_decay=0.0)
    return layer, AdamW(groups, lr=1e-4, eps=1e-30, master=master, seed=3)  # type: ignore[arg-type]


@pytest.mark.parametrize("master", ["fp32", "bf16"])
def test_small_updates_of_bf16_weights_are_not_lost(master: str) -> None:
    """A bf16 weight of 1 after 1000 updates of -1e-4 stays 1 with nearest rounding; here it arrives at 0.9."""
    layer, optimizer = one_weight(master)
    for _ in range(1000):
        layer.weight.grad = torch.ones_like(layer.weight)
        optimizer.step()
    assert layer.weight.float().mean().item() == pytest.approx(0.9, abs=2e-3)
    assert ("master/weight" in optimizer.named_state()) == (master == "fp32")


def test_state_round_trip_is_bit_equal_with_stochastic_rounding() -> None:
    torch.manual_seed(1)
    grads = [torch.randn(16, 256).to(torch.bfloat16) for _ in range(8)]
    layer, optimizer = one_weight("bf16")
    for i, grad in enumerate(grads):
        if i == 4:
            saved = {k: v.clone() for k, v in optimizer.named_state().items()}
            weight = layer.weight.detach().clone()
        layer.weight.grad = grad
        optimizer.step()
    resumed, again = one_weight("bf16")
    with torch.no_grad():
        resumed.weight.copy_(weight)
    again.load_named_state(saved, num_steps=4)
    for grad in grads[4:]:
        resumed.weight.grad = grad
        again.step()
    assert torch.equal(resumed.weight, layer.weight)


def test_state_of_another_model_is_refused() -> None:
    _, optimizer = one_weight("fp32")
    with pytest.raises(CheckpointError, match="does not train"):
        optimizer.load_named_state({"exp_avg/other": torch.zeros(1)}, num_steps=1)
    with pytest.raises(CheckpointError, match="has shape"):
        optimizer.load_named_state({"exp_avg/weight": torch.zeros(1)}, num_steps=1)


def test_stochastic_rounding_is_unbiased_and_keeps_specials() -> None:
    values = torch.full((200_000,), 1.0 + 2**-9)  # a quarter of the bf16 step above 1
    bits = torch.randint(0, 2**32, (200_000,), dtype=torch.int64)
    assert stochastic_round_bf16(values, bits).float().mean().item() == pytest.approx(1.0 + 2**-9, abs=1e-4)
    special = torch.tensor([float("inf"), float("-inf"), float("nan"), 0.0])
    out = stochastic_round_bf16(special, torch.full((4,), 2**32 - 1))
    assert out[0] == float("inf") and out[1] == float("-inf") and out[2].isnan() and out[3] == 0


def test_clipping_equals_torch() -> None:
    ours, theirs = twin_models()
    for model in (ours, theirs):
        model(torch.ones(4, 7), True).square().sum().backward()
    norm = grad_norm(ours.parameters())
    torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(theirs.parameters(), 0.5))
    scale_grads(ours.parameters(), clip_factor(norm.item(), 0.5))
    torch.testing.assert_close(ours.first.weight.grad, theirs.first.weight.grad)
    assert clip_factor(3.0, 0.0) == 1.0


def test_names_act_are_noted_or_are_refused() -> None:
    groups = parameter_groups(nn.Linear(2, 2), lr=0.1, weight_decay=0.0)
    assert type(make_optimizer("adamw_torch_fused", groups, lr=0.1)).__name__ == "AdamW"
    assert type(make_optimizer("sgd", groups, lr=0.1)).__name__ == "SGD"
    with pytest.raises(ConfigError, match="paged_adamw_8bit is not built"):
        make_optimizer("paged_adamw_8bit", groups, lr=0.1)
    with pytest.raises(ConfigError, match="did you mean 'adamw_torch'"):
        make_optimizer("adamw_troch", groups, lr=0.1)


def test_sgd_equals_torch() -> None:
    ours, theirs = twin_models()
    optimizer = make_optimizer("sgd", parameter_groups(ours, lr=0.1, weight_decay=0.0), lr=0.1)
    reference = torch.optim.SGD(theirs.parameters(), lr=0.1)
    for model, opt in ((ours, optimizer), (theirs, reference)):
        model(torch.ones(4, 7), True).square().sum().backward()
        opt.step()
    torch.testing.assert_close(ours.first.weight, theirs.first.weight)
