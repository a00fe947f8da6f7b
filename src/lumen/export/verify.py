"""Does the export answer like its source?  Mean KL divergence and perplexity on held-out rows.

For every token that counts the source gives a distribution p over the vocabulary and the export a distribution q:

    KL(p ‖ q) = Σ p · (log p - log q)      nats, 0 where they agree
    perplexity = exp(mean of -log q(the token that really follows))

KL sees every change of the distribution, perplexity only what happens to the one true token and so changes little, or
even improves, when quantisation moves the rest.  Greedy agreement (how often both name the same most likely token) is
told as information only: it counts ties between two likely tokens as loudly as a real failure.

Source and export are never in memory together: the source's log-probabilities lie in a scratch folder meanwhile (four
bytes per vocabulary entry and token).  Both are computed in the same dtype, fp32 unless `infer_dtype` says otherwise,
so that what is seen is what the export changed.
"""

from __future__ import annotations

import math
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from lumen.core import ModelError
from lumen.export.rows import Rows


@dataclass
class Verification:
    """rows: what was compared on.  tokens: predictions.  kl, kl_max: mean and largest, nats.  limit: bound of the mean.

    perplexity_source, perplexity: of source and export.  agreement: share of tokens with the same most likely one.
    """

    rows: str
    tokens: int
    kl: float
    kl_max: float
    perplexity_source: float
    perplexity: float
    agreement: float
    limit: float
    dtype: str
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """JSON values."""
        return asdict(self)

    def check(self, where: str = "export_max_kl") -> None:
        """Raise ModelError where the mean KL is above the limit or no number."""
        if math.isfinite(self.kl) and self.kl <= self.limit:
            return
        raise ModelError(
            f"the export does not answer like its source: mean KL {self.kl:.3g} nats a token, more than {self.limit:g}",
            where=where,
            fix="nothing was written; choose a format with more bits, or raise export_max_kl if this is acceptable",
        )

    def line(self) -> str:
        """One line for the terminal."""
        return (
            f"mean KL {self.kl:.2e} (limit {self.limit:g}), perplexity {self.perplexity_source:.4g} → "
            f"{self.perplexity:.4g}, same greedy token {self.agreement:.1%}; {self.tokens:,} tokens of {self.rows}"
        )


class Reference:
    """The source's log-probabilities on the rows, in files of a scratch folder."""

    def __init__(self, model: Any, rows: Rows, scratch: Path) -> None:
        self.rows = rows
        self.scratch = scratch
        self.dtype = str(model.dtype).removeprefix("torch.")
        for number, found in enumerate(_log_probabilities(model, rows)):
            save_file({"logp": found}, self._file(number))

    def _file(self, number: int) -> Path:
        return self.scratch / f"row-{number}.safetensors"

    def compare(self, model: Any, limit: float) -> Verification:
        """The export against the source."""
        begin = time.monotonic()
        kl, kl_max, nll_p, nll_q, same, count = 0.0, 0.0, 0.0, 0.0, 0, 0
        for number, q in enumerate(_log_probabilities(model, self.rows)):
            p = load_file(self._file(number))["logp"]
            size = min(p.shape[-1], q.shape[-1])
            p, q = (p[:, :size].log_softmax(-1), q[:, :size].log_softmax(-1)) if p.shape != q.shape else (p, q)
            each = (p.exp() * (p - q)).sum(-1)
            truth = self.rows.ids[number][self.rows.scored[number]].unsqueeze(-1)
            kl += each.double().sum().item()
            kl_max = max(kl_max, each.max().item()) if not each.isnan().any() else math.nan
            nll_p -= p.gather(-1, truth).double().sum().item()
            nll_q -= q.gather(-1, truth).double().sum().item()
            same += int((p.argmax(-1) == q.argmax(-1)).sum())
            count += len(truth)
        return Verification(
            self.rows.name,
            count,
            max(0.0, kl / count) if math.isfinite(kl) else math.nan,
            kl_max,
            _exp(nll_p / count),
            _exp(nll_q / count),
            same / count,
            limit,
            self.dtype,
            round(time.monotonic() - begin, 2),
        )


def _exp(value: float) -> float:
    return math.exp(value) if value < 700 else math.inf


@torch.no_grad()
def _log_probabilities(model: Any, rows: Rows) -> Any:
    """fp32 [scored tokens, V] of each row: what the model says before it sees the token."""
    device = model.get_input_embeddings().weight.device
    model.eval()
    for ids, scored in zip(rows.ids, rows.scored, strict=True):
        logits = model(input_ids=ids[None].to(device), use_cache=False).logits[0, :-1]
        yield logits[scored[1:].to(device)].float().log_softmax(-1).cpu().contiguous()
