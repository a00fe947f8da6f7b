"""One run: the same bare loop for bf16, for ours and for the independent implementation.

Everything but the linear layers is shared, and the order of rows is a function of the seed alone; its digest is in
every result, because the largest gap ever blamed on FP8 in a comparable project was a missing shuffle.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lumen.quant as quant
from lumen.bench.loss_gap import independent
from lumen.bench.loss_gap.bases import Base, fingerprint
from lumen.bench.loss_gap.cases import BASELINE, Case

IMPLEMENTATIONS = ("bf16", "ours", "independent")


def loss_of(model: Any, ids: Tensor, labels: Tensor, *, autocast: bool) -> tuple[Tensor, Tensor]:
    """Sum of the cross entropies [B] and number of learned tokens [B] of rows [B, T]; differentiable.

    Only the learned positions pass through the output head.
    """
    bare = model.get_base_model() if hasattr(model, "peft_config") else model
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        hidden = bare.model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1]
        targets = labels[:, 1:]
        learned = targets != -100
        logits = bare.get_output_embeddings()(hidden[learned])
    each = F.cross_entropy(logits.float(), targets[learned], reduction="none")
    row = learned.nonzero()[:, 0]
    sums = torch.zeros(len(ids), dtype=each.dtype).index_add(0, row, each)
    return sums, learned.sum(1)


def order_of(base: Base, rows: int, seed: int) -> Tensor:
    """The training rows in the order of a seed: the same set for every seed, [rows]."""
    generator = torch.Generator().manual_seed(100 + seed)
    return torch.randperm(min(rows, base.pool), generator=generator)


def prepare(base: Base, case: Case | None, implementation: str, seed: int) -> Any:
    """A fresh model of the base, quantised by the implementation, with its trainable parameters set."""
    model = base.model()
    frozen = base.settings.frozen
    model.requires_grad_(not frozen)
    if implementation == "ours":
        assert case is not None
        quant.quantize(model, case.section, frozen=frozen, seed=seed)
    elif implementation == "independent":
        assert case is not None
        independent.fake_quantise(model, case.name, frozen=frozen, seed=seed)
    if frozen:
        from lumen.adapters.config import AdapterConfig
        from lumen.adapters.fused import fuse_lora
        from lumen.adapters.inject import inject

        config = AdapterConfig(finetuning_type="lora", lora_rank=base.settings.lora_rank, lora_dropout=0.0)
        model = inject(model, config, seed=seed)
        fuse_lora(model)
    return model


class Stepper:
    """AdamW with warm-up then a constant rate; clips the gradient's norm at 1."""

    def __init__(self, model: nn.Module, base: Base) -> None:
        self.base, self.model = base, model
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(self.parameters, lr=0.0, betas=(0.9, 0.95), weight_decay=0.0)
        self.done = 0

    def step(self, ids: Tensor, labels: Tensor) -> float:
        """One optimizer step on rows [B, T]; the mean loss per learned token before it."""
        settings = self.base.settings
        quant.set_step(self.model, self.done)
        rate = settings.learning_rate * min(1.0, (self.done + 1) / settings.warmup_steps)
        self.optimizer.param_groups[0]["lr"] = rate
        sums, counts = loss_of(self.model, ids, labels, autocast=self.base.autocast)
        loss = sums.sum() / counts.sum()
        loss.backward()
        nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.done += 1
        return float(loss.detach())


@torch.no_grad()
def held_out(model: nn.Module, base: Base) -> dict[str, list[float]]:
    """Sum of losses and number of tokens of every held-out row."""
    model.eval()
    sums: list[float] = []
    counts: list[float] = []
    for at in range(base.pool, len(base.ids), base.settings.batch):
        rows = slice(at, min(at + base.settings.batch, len(base.ids)))
        s, n = loss_of(model, base.ids[rows], base.labels[rows], autocast=base.autocast)
        sums += [round(float(v), 5) for v in s]
        counts += [int(v) for v in n]
    return {"loss": sums, "tokens": counts}


def run(base: Base, case: Case | None, implementation: str, *, seed: int, rows: int) -> dict[str, Any]:
    """Train and evaluate one cell; the result without what names it.

    `quantised`: held-out losses as trained, operands quantised; `high`: the same weights evaluated in bf16 (a frozen
    weight as its stored values).
    """
    start = time.perf_counter()
    model = prepare(base, case, implementation, seed)
    order = order_of(base, rows, seed)
    stepper, losses = Stepper(model, base), []
    model.train()
    for at in range(0, len(order) - base.settings.batch + 1, base.settings.batch):
        chosen = order[at : at + base.settings.batch]
        losses.append(stepper.step(base.ids[chosen], base.labels[chosen]))
    trained = time.perf_counter() - start
    result: dict[str, Any] = {"quantised": held_out(model, base)}
    if implementation != BASELINE:
        if implementation == "ours":
            quant.dequantize(model)
        else:
            independent.enable(model, False)
        result["high"] = held_out(model, base)
    return {
        **result,
        "train_loss": [round(v, 5) for v in losses],
        "order": fingerprint(base.ids[order]),
        "train_seconds": round(trained, 1),
        "seconds": round(time.perf_counter() - start, 1),
    }
