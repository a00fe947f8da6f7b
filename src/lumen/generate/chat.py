"""A conversation with a model: its turns, its system message, and what to forget when the context is full."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from lumen.core import LumenError, note
from lumen.generate.config import GenerateConfig
from lumen.generate.sampler import Generation, context_length, encode, generate
from lumen.models.load import LoadedModel


class Chat:
    """Turns kept between calls of `ask`.

    loaded:     model and tokenizer; without a chat template the text so far is simply continued.
    config:     sampling (GenerateConfig), `seed`, `default_system`, `enable_thinking`.
    fixed_seed: turn i draws from (seed, i), so a conversation repeats; else from the system's randomness.
    """

    def __init__(self, loaded: LoadedModel, config: GenerateConfig | Any, *, fixed_seed: bool = True) -> None:
        self.loaded = loaded
        self.config = config
        self.system: str | None = getattr(config, "default_system", None)
        self.messages: list[dict[str, Any]] = []
        self._fixed = fixed_seed
        self._turns = 0
        self._template = bool(getattr(loaded.tokenizer, "chat_template", None))
        if not self._template:
            note("the tokenizer has no chat template: text is continued as it is (template: NAME sets one)")

    def clear(self) -> None:
        """Forget the turns."""
        self.messages = []

    def set_system(self, text: str) -> None:
        """Set or (with an empty text) remove the system message, and forget the turns."""
        self.system = text or None
        self.clear()

    def ask(self, text: str, on_text: Callable[[str], None] | None = None) -> Generation:
        """Answer a turn; `on_text` gets the answer in pieces.

        An answer that is interrupted is kept as far as it got; a turn that the template refuses is not kept.
        """
        self.messages.append({"role": "user", "content": text})
        try:
            prompt = self._prompt()
        except LumenError:
            self.messages.pop()
            raise
        said: list[str] = []

        def take(_row: int, piece: str) -> None:
            said.append(piece)
            if on_text is not None:
                on_text(piece)

        seed = getattr(self.config, "seed", 42) + self._turns if self._fixed else int.from_bytes(os.urandom(4), "big")
        self._turns += 1
        try:
            return generate(self.loaded.model, self.loaded.tokenizer, prompt, self.config, on_text=take, seed=seed)[0]
        finally:
            self.messages.append({"role": "assistant", "content": "".join(said)})

    def _prompt(self) -> list[int]:
        """Ids of the conversation; the oldest turns are left out where they no longer fit beside an answer."""
        room = context_length(self.loaded.model)
        while True:
            ids = self._ids()
            answer = min(self.config.max_new_tokens, 256)
            if room is None or len(ids) + answer <= room or len(self.messages) < 3:
                return ids
            note("the conversation no longer fits into the model's context: its oldest turns are left out")
            del self.messages[:2]

    def _ids(self) -> list[int]:
        tokenizer = self.loaded.tokenizer
        if not self._template:
            return encode(tokenizer, "\n".join(filter(None, [self.system, *(m["content"] for m in self.messages)])))
        system = [{"role": "system", "content": self.system}] if self.system else []
        thinking = getattr(self.config, "enable_thinking", True)
        return encode(tokenizer, [*system, *self.messages], enable_thinking=thinking)
