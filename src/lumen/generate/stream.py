"""Text from tokens as they come: only whole characters, and never part of a stop string.

A Chinese character is three bytes and an emoji four, often two or more tokens; decoding each token alone would print
replacement characters.  So the tokens since the last piece are decoded together with a few before them (a tokenizer may
write a space depending on what precedes), and a piece is given out when its text ends in a whole character.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_BROKEN = "�"


class TextStream:
    """Decodes one answer token by token.

    `push(token)` and `finish()` return the new text, possibly empty; `text` is all that was returned.  After a stop
    string `stopped` is true and nothing more comes; the stop string itself is never part of the text.
    """

    def __init__(self, tokenizer: Any, *, stop_strings: Sequence[str] = (), skip_special_tokens: bool = True) -> None:
        self.text = ""
        self.stopped = False
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._stops = [stop for stop in stop_strings if stop]
        self._tokens: list[int] = []
        self._context = 0  # first token that is decoded again
        self._done = 0  # tokens whose text was taken
        self._held = ""  # text that may be the beginning of a stop string

    def _decode(self, begin: int, end: int) -> str:
        return self._tokenizer.decode(
            self._tokens[begin:end], skip_special_tokens=self._skip, clean_up_tokenization_spaces=False
        )

    def _take(self, *, all_of_it: bool) -> str:
        before = self._decode(self._context, self._done)
        now = self._decode(self._context, len(self._tokens))
        if len(now) <= len(before) or (now.endswith(_BROKEN) and not all_of_it):
            return ""
        self._context, self._done = self._done, len(self._tokens)
        return now[len(before) :]

    def push(self, token: int) -> str:
        """Add a token; returns the text that became whole."""
        if self.stopped:
            return ""
        self._tokens.append(token)
        return self._release(self._take(all_of_it=False), last=False)

    def finish(self) -> str:
        """No more tokens: returns what was held back."""
        return "" if self.stopped else self._release(self._take(all_of_it=True), last=True)

    def _release(self, piece: str, *, last: bool) -> str:
        held = self._held + piece
        found = [at for stop in self._stops if (at := held.find(stop)) >= 0]
        if found:
            self.stopped = True
            held, self._held = held[: min(found)], ""
        elif last:
            self._held = ""
        else:
            keep = _partial(held, self._stops)
            held, self._held = held[: len(held) - keep], held[len(held) - keep :]
        self.text += held
        return held


def _partial(text: str, stops: Sequence[str]) -> int:
    """Length of the longest end of `text` that begins a stop string."""
    longest = 0
    for stop in stops:
        for size in range(min(len(stop) - 1, len(text)), longest, -1):
            if text.endswith(stop[:size]):
                longest = size
                break
    return longest
