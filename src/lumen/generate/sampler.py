"""Generate text with a KV cache.

The prompt runs once and leaves its keys and values in the cache (prefill); each further step computes one token and
attends to the cache (decode).  Rows of a batch have different lengths, so prompts are padded on the *left*: then the
next token of every row is at the same place.  Padding is masked and positions count real tokens only, so a row's answer
does not depend on its neighbours; each row draws from a generator of its own, seeded with (seed, row).

Prompts are tokenised by `data.render.prompt_ids`, which training uses too: the same conversation gives the same ids.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch

from lumen.core import DataError, ModelError
from lumen.data.render import prompt_ids
from lumen.data.templates import stop_token_ids
from lumen.generate.choose import is_greedy, next_token
from lumen.generate.config import GenerateConfig
from lumen.generate.stream import TextStream
from lumen.models.tokenizer import end_token_ids

Messages = list[dict[str, Any]]
Prompt = str | Messages | list[int]
"""Plain text to be continued, a conversation to be answered, or token ids."""

OnText = Callable[[int, str], None]
"""Called with (row, new text) as text becomes whole."""


@dataclass
class Generation:
    """An answer.

    text:          the answer, without the end token and the stop string.
    token_ids:     the generated ids, the end token included.
    finish_reason: stop (end token or stop string) or length (max_new_tokens, or the model's context is full).
    prompt_tokens: number of ids in the prompt.
    """

    text: str
    token_ids: list[int]
    finish_reason: Literal["stop", "length"]
    prompt_tokens: int


def encode(
    tokenizer: Any,
    prompt: Prompt,
    *,
    tools: Any = None,
    enable_thinking: bool | None = True,
    default_system: str | None = None,
) -> list[int]:
    """Token ids of a prompt.  Raises DataError for an empty one, and for messages without a chat template."""
    if isinstance(prompt, str):
        ids = [int(i) for i in tokenizer(prompt)["input_ids"]]
    elif prompt and isinstance(prompt[0], dict):
        ids = prompt_ids(tokenizer, prompt, tools=tools, enable_thinking=enable_thinking, default_system=default_system)
    else:
        ids = list(cast("list[int]", prompt))
    if not ids:
        raise DataError("the prompt is empty", where="prompt", fix="give at least one token")
    return ids


def generate(
    model: Any,
    tokenizer: Any,
    prompts: Prompt | Sequence[Prompt],
    config: GenerateConfig | None = None,
    *,
    on_text: OnText | None = None,
    seed: int = 42,
    batch_size: int = 8,
    stop_strings: Sequence[str] = (),
    tools: Any = None,
    enable_thinking: bool | None = True,
    default_system: str | None = None,
) -> list[Generation]:
    """Answer prompts; a single one may be given without a list.  Returns one Generation per prompt, in order.

    model:      any causal language model of transformers, with or without a PEFT adapter.  Its mode is restored.
    on_text:    called with (row, piece) while text is generated.
    seed:       row i draws from (seed, i): the answer does not depend on batch_size.
    batch_size: rows that run together; prompts of similar length are put together.
    The other keywords are for conversations, see `data.render.prompt_ids`.

    Raises ConfigError for impossible settings, DataError for empty prompts, ModelError for prompts that fill the
    model's context.
    """
    config = config or GenerateConfig()
    rows = cast("list[Prompt]", [prompts] if _is_one(prompts) else list(prompts))
    encoded = [
        encode(tokenizer, row, tools=tools, enable_thinking=enable_thinking, default_system=default_system)
        for row in rows
    ]
    room = context_length(model)
    for number, ids in enumerate(encoded):
        if room is not None and len(ids) >= room:
            raise ModelError(
                f"prompt {number + 1} has {len(ids)} tokens; the model's context is {room}",
                where="prompt",
                fix="shorten it",
            )
    ends = end_token_ids(model, tokenizer) | set(stop_token_ids(tokenizer))
    stops = [*(config.stop_strings or []), *stop_strings]
    results: dict[int, Generation] = {}
    order = sorted(range(len(encoded)), key=lambda i: len(encoded[i]))
    with _evaluating(model), torch.no_grad():
        for begin in range(0, len(order), batch_size):
            part = order[begin : begin + batch_size]
            results |= _run(model, tokenizer, {i: encoded[i] for i in part}, config, ends, stops, on_text, seed, room)
    return [results[i] for i in range(len(encoded))]


def _is_one(prompts: Any) -> bool:
    return isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], dict | int))


def context_length(model: Any) -> int | None:
    """Tokens that the model's positions allow; None where its config does not say."""
    config = model.config.get_text_config() if hasattr(model.config, "get_text_config") else model.config
    return getattr(config, "max_position_embeddings", None)


@contextmanager
def _evaluating(model: Any) -> Iterator[None]:
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _run(
    model: Any,
    tokenizer: Any,
    prompts: dict[int, list[int]],
    config: GenerateConfig,
    ends: set[int],
    stops: Sequence[str],
    on_text: OnText | None,
    seed: int,
    room: int | None,
) -> dict[int, Generation]:
    """One batch; the keys of `prompts` are the row numbers."""
    numbers = list(prompts)
    device = model.get_input_embeddings().weight.device
    longest = max(map(len, prompts.values()))
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
    ids = torch.full((len(numbers), longest), pad, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, number in enumerate(numbers):
        ids[row, longest - len(prompts[number]) :] = torch.tensor(prompts[number])
        mask[row, longest - len(prompts[number]) :] = 1
    streams = [
        TextStream(tokenizer, stop_strings=stops, skip_special_tokens=config.skip_special_tokens) for _ in numbers
    ]
    answers: list[list[int]] = [[] for _ in numbers]
    seen = [set(prompts[number]) for number in numbers]
    reasons: list[Literal["stop", "length"] | None] = [None] * len(numbers)
    generators = [None if is_greedy(config) else _generator(seed, number) for number in numbers]

    def give(row: int, piece: str) -> None:
        if piece and on_text is not None:
            on_text(numbers[row], piece)

    ids, mask = ids.to(device), mask.to(device)
    positions = (mask.cumsum(dim=-1) - 1).clamp(min=0)
    takes = _parameters(model)
    cache_name = "cache" if "cache" in takes else "past_key_values"  # renamed during transformers 5
    extra: dict[str, Any] = {"logits_to_keep": 1} if "logits_to_keep" in takes else {}
    padded = bool((mask == 0).any())
    while True:
        output = model(
            input_ids=ids,
            attention_mask=mask if padded else None,
            position_ids=positions,
            use_cache=True,
            **extra,
        )
        extra[cache_name] = output[cache_name]
        logits = output.logits[:, -1]
        fresh = [pad] * len(numbers)
        for row, number in enumerate(numbers):
            if reasons[row] is not None:
                continue
            token = next_token(logits[row], seen[row], config, generators[row])
            fresh[row] = token
            answers[row].append(token)
            seen[row].add(token)
            if token in ends:
                if not config.skip_special_tokens:
                    give(row, streams[row].push(token))
                reasons[row] = "stop"
            else:
                give(row, streams[row].push(token))
                full = room is not None and len(prompts[number]) + len(answers[row]) >= room
                if streams[row].stopped:
                    reasons[row] = "stop"
                elif len(answers[row]) >= config.max_new_tokens or full:
                    reasons[row] = "length"
            if reasons[row] is not None:
                give(row, streams[row].finish())
        if all(reason is not None for reason in reasons):
            break
        ids = torch.tensor(fresh, device=device).unsqueeze(1)
        mask = torch.cat([mask, mask.new_ones(len(numbers), 1)], dim=1)
        positions = positions[:, -1:] + 1
    return {
        number: Generation(streams[row].text, answers[row], reasons[row] or "length", len(prompts[number]))
        for row, number in enumerate(numbers)
    }


def _generator(seed: int, row: int) -> torch.Generator:
    return torch.Generator().manual_seed((seed * 1_000_003 + row) % 2**63)


def _parameters(model: Any) -> set[str]:
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    return set(inspect.signature(inner.forward).parameters)
