"""Prompts and reference answers of held-out rows, for generations before and after.

A prompt is the row up to its last assistant turn; that turn is the reference.  The rows are found by where the held-out
examples came from, so a split made by `val_size` gives the prompts of exactly the rows that were not trained on.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from lumen.data.config import DataConfig
from lumen.data.conversation import NothingToLearn, RowError
from lumen.data.examples import ExampleStore
from lumen.data.info import find_datasets
from lumen.data.readers import Row
from lumen.data.render import prompt_ids
from lumen.data.rows import to_conversation
from lumen.data.tokenize import Source


@dataclass(frozen=True)
class Prompt:
    """messages: OpenAI's dictionaries up to where the assistant answers.  reference: what the data answers.

    source: `file:line` or `file, row n`.
    """

    messages: list[dict[str, Any]]
    reference: str
    source: str
    tools: list[dict[str, Any]] | None = None

    @property
    def question(self) -> str:
        """The last message before the answer."""
        return str(self.messages[-1].get("content") or "") if self.messages else ""

    def ids(self, tokenizer: Any, config: DataConfig) -> list[int]:
        """The tokens that training saw before this answer."""
        return prompt_ids(
            tokenizer,
            self.messages,
            tools=self.tools,
            enable_thinking=config.enable_thinking,
            default_system=config.default_system,
        )


def held_out_prompts(config: DataConfig, names: Iterable[str], store: ExampleStore, count: int) -> list[Prompt]:
    """The prompts of the first `count` rows of `store`.

    names: the datasets that `store` was made of.  Plain text (stage pt) has no prompts: the list is empty.
    """
    wanted: dict[str, Prompt | None] = {}
    for table, example in store.picks:
        if len(wanted) == count:
            break
        wanted.setdefault(store.tables[int(table)].source(int(example)))
    for spec in find_datasets(list(names), config.dataset_dir):
        source = Source(spec, config)
        for file, row in source.rows():
            place = source.place(file, row)
            if isinstance(row, Row) and place in wanted and source.spec.formatting != "text":
                wanted[place] = _prompt(row, source, place)
    return [prompt for prompt in wanted.values() if prompt is not None]


def _prompt(row: Row, source: Source, place: str) -> Prompt | None:
    try:
        conversation = to_conversation(row.value, source.spec)
    except (RowError, NothingToLearn):
        return None  # not among the examples either
    messages = conversation.messages
    last = max((i for i, message in enumerate(messages) if message.role == "assistant"), default=None)
    if not last:
        return None
    return Prompt([m.as_dict() for m in messages[:last]], messages[last].content, place, conversation.tools)
