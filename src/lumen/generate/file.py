"""Answer a file of prompts and write the answers as JSON lines."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from lumen.core import ConfigError, say
from lumen.core.files import atomic_write_text
from lumen.generate.open import open_model
from lumen.generate.prompts import FilePrompt, read_prompts
from lumen.generate.sampler import Generation, generate

_ROUND = 8
"""Batches between two lines of progress."""


def answer_file(
    config: Any, prompts_file: str, out: str | None = None, *, batch_size: int = 8, limit: int | None = None
) -> list[dict[str, Any]]:
    """Answer every prompt of `prompts_file`, in order; returns the objects that were written.

    out: a file, written whole at the end (None: each line goes to standard output as soon as it is there).
    Prompts are checked before the model is loaded.
    """
    prompts = read_prompts(prompts_file, encoding=config.encoding)[:limit]
    if out is not None and Path(out).is_dir():
        raise ConfigError(f"{out} is a directory", where="--out", fix="give a file name")
    loaded = open_model(config)
    records: list[dict[str, Any]] = []
    begin, tokens = time.monotonic(), 0
    step = batch_size * _ROUND
    for first in range(0, len(prompts), step):
        part = prompts[first : first + step]
        answers = _answers(loaded, part, config, batch_size, config.seed + first)
        for prompt, answer in zip(part, answers, strict=True):
            records.append(_record(prompt, answer))
            tokens += len(answer.token_ids)
            if out is None:
                sys.stdout.write(json.dumps(records[-1], ensure_ascii=False) + "\n")
                sys.stdout.flush()
        seconds = time.monotonic() - begin
        say(f"{len(records)} of {len(prompts)} prompts, {tokens / max(seconds, 1e-9):.1f} tokens/s")
    if out is not None:
        atomic_write_text(Path(out), "".join(json.dumps(r, ensure_ascii=False) + "\n" for r in records))
        say(f"{len(records)} answers in {out}")
    return records


def _answers(loaded: Any, prompts: list[FilePrompt], config: Any, batch_size: int, seed: int) -> list[Generation]:
    """Rows with tools are rendered with them one by one; the rest run in batches."""
    common: dict[str, Any] = {
        "seed": seed,
        "enable_thinking": config.enable_thinking,
        "default_system": config.default_system,
    }
    if not loaded.tokenizer.chat_template:
        texts = ["\n".join(m["content"] for m in prompt.messages) for prompt in prompts]
        return generate(loaded.model, loaded.tokenizer, texts, config, batch_size=batch_size, seed=seed)
    if not any(prompt.tools for prompt in prompts):
        rows = [prompt.messages for prompt in prompts]
        return generate(loaded.model, loaded.tokenizer, rows, config, batch_size=batch_size, **common)
    return [
        generate(loaded.model, loaded.tokenizer, prompt.messages, config, tools=prompt.tools, **common)[0]
        for prompt in prompts
    ]


def _record(prompt: FilePrompt, answer: Generation) -> dict[str, Any]:
    record: dict[str, Any] = {
        "messages": prompt.messages,
        "response": answer.text,
        "finish_reason": answer.finish_reason,
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": len(answer.token_ids),
    }
    return record if prompt.reference is None else {**record, "reference": prompt.reference}
