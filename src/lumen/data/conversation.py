"""The one internal form of a row: a conversation.

Every row format (alpaca, sharegpt, OpenAI messages, prompt and completion) becomes a list of messages with the roles
that chat templates know: system, user, assistant, tool.  Everything after this point knows no row formats.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from lumen.core import DataError

ROLES = ("system", "user", "assistant", "tool")


class RowError(DataError):
    """What is wrong with one row.  `field` names the column; the reader adds file, line and row."""

    def __init__(self, reason: str, *, field: str = "", fix: str = "") -> None:
        self.reason = reason
        self.field = field
        super().__init__(f"field {field}: {reason}" if field else reason, fix=fix)


class NothingToLearn(Exception):
    """A row that is well formed and has nothing to train on: dropped, counted, listed; never an error."""


@dataclass
class Message:
    """One turn.

    role:              system, user, assistant or tool.
    content:           its text ("" where a tool call has none).
    tool_calls:        [{"type": "function", "function": {"name": …, "arguments": {…}}}] or None.
    reasoning_content: what the assistant thought before it answered, or None.
    train:             False where the data says this assistant turn is not to be learned (OpenAI's `weight: 0`).
    """

    role: str
    content: str = ""
    tool_calls: list[dict[str, Any]] | None = None
    reasoning_content: str | None = None
    train: bool = True
    extra: dict[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """What the chat template is given."""
        message: dict[str, Any] = {"role": self.role, "content": self.content, **self.extra}
        if self.tool_calls:
            message["tool_calls"] = self.tool_calls
        if self.reasoning_content is not None:
            message["reasoning_content"] = self.reasoning_content
        return message

    @property
    def empty(self) -> bool:
        """Nothing was said: no text but spaces, no call, no reasoning."""
        return not (self.content.strip() or self.tool_calls or (self.reasoning_content or "").strip())


@dataclass
class Conversation:
    """Messages in order, the tools they may call, and for preference rows the two answers.

    unanswered: turns after the last answer that were left out, because nothing answers them.
    """

    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    chosen: Message | None = None
    rejected: Message | None = None
    unanswered: int = 0
