"""Choose the next token from logits: repetition penalty, temperature, top-k, top-p, in this order.

The order is the one of transformers and of LLaMA-Factory, so the same settings mean the same thing.

- repetition penalty p (Keskar et al. 2019, CTRL): the logit of every token seen so far is divided by p if positive and
  multiplied by p if negative;
- temperature t divides the logits: below 1 sharpens, 0 is greedy;
- top-k keeps the k likeliest tokens;
- top-p (nucleus, Holtzman et al. 2020) keeps the fewest tokens whose probability reaches p, at least one.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from lumen.generate.config import GenerateConfig


def is_greedy(config: GenerateConfig) -> bool:
    return not config.do_sample or config.temperature == 0


def penalized(logits: torch.Tensor, seen: Iterable[int], penalty: float) -> torch.Tensor:
    """fp32 logits [V] with the repetition penalty on the tokens in `seen`."""
    logits = logits.float()
    if penalty == 1.0:
        return logits
    index = torch.tensor(sorted(set(seen)), dtype=torch.long, device=logits.device)
    values = logits[index]
    return logits.scatter(0, index, torch.where(values > 0, values / penalty, values * penalty))


def probabilities(logits: torch.Tensor, config: GenerateConfig) -> torch.Tensor:
    """fp32 probabilities [V] after temperature, top-k and top-p."""
    logits = logits.float() / config.temperature
    if 0 < config.top_k < logits.shape[-1]:
        smallest = logits.topk(config.top_k).values[-1]
        logits = logits.masked_fill(logits < smallest, -torch.inf)
    chances = logits.softmax(dim=-1)
    if config.top_p < 1:
        ordered, index = chances.sort(descending=True)
        dropped = ordered.cumsum(dim=-1) - ordered >= config.top_p  # the mass before a token already reaches p
        chances = chances.index_fill(0, index[dropped], 0.0)
        chances = chances / chances.sum()
    return chances


def next_token(
    logits: torch.Tensor, seen: Iterable[int], config: GenerateConfig, generator: torch.Generator | None
) -> int:
    """One token id from logits [V]; `seen` are the ids of prompt and answer so far; greedy needs no generator."""
    logits = penalized(logits, seen, config.repetition_penalty)
    if is_greedy(config):
        return int(logits.argmax())
    return int(torch.multinomial(probabilities(logits.cpu(), config), 1, generator=generator))
