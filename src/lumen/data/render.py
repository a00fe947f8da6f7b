"""Chat rendering and loss masks: which tokens of a conversation are learned.

The text is what the tokenizer's own chat template makes, tokenised as chat and serving do (`prompt_ids`), so a model is
trained on the ids it will meet.  What is learned are the assistant's turns: from the first character the model would
generate to the token that ends the turn.

Where a turn begins and ends is found without knowing the template:

- `{% generation %}` blocks, where the template has them;
- else a turn begins where the template's prompt for it ends (the messages before it, rendered with
  `add_generation_prompt`), and ends where the conversation up to it ends.  Both must be prefixes of the whole text.

Some templates show a turn in another way once it is history: Qwen3's drops earlier reasoning.  Then the turn is not in
the whole text as the model would have generated it, and training on what is there would teach another answer.  Such a
turn is learned in a rendering of its own that ends with it; the turns that agree share one rendering, so a stable
template always gives exactly one.

Tokens are assigned by character offsets.  If a token reaches over the place where generation would begin, the text is
tokenised in parts cut there, because in chat the prompt's tokens end at that place.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jinja2.exceptions import TemplateError

from lumen.core import DataError
from lumen.data.conversation import Conversation, Message, NothingToLearn, RowError
from lumen.data.rows import THINK, without_reasoning

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_PROBE = "\ue000\ue001"
"""Private-use characters that no template and no data contain."""


@dataclass
class Rendering:
    """A conversation as text, with the character ranges of its assistant turns.

    text:     what is tokenised.
    spans:    (begin, end, learned) in order, one for each assistant turn that this rendering shows faithfully.
    messages: the messages it was made of.
    """

    text: str
    spans: list[tuple[int, int, bool]]
    messages: list[Message]


class ChatRenderer:
    """Renders conversations through a tokenizer's chat template.

    enable_thinking: given to the template; False also takes reasoning out of the rows; None leaves both alone.
    default_system:  system message of conversations without one.
    mask_history:    learn only the last assistant turn.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        enable_thinking: bool | None = True,
        default_system: str | None = None,
        mask_history: bool = False,
    ) -> None:
        if not getattr(tokenizer, "chat_template", None):
            raise DataError(
                "the tokenizer has no chat template", where="template", fix="name one, for example `template: chatml`"
            )
        self.tokenizer = tokenizer
        self.enable_thinking = enable_thinking
        self.default_system = default_system
        self.mask_history = mask_history
        template = tokenizer.chat_template
        template = template if isinstance(template, str) else tokenizer.get_chat_template()
        self.has_generation = bool(_GENERATION.search(template))
        self.specials = special_tokens(tokenizer)
        self.eos = tokenizer.eos_token or ""

    def text(self, messages: Sequence[Message], tools: Any = None, *, generation: bool = False) -> str:
        """The template's text.  Raises RowError where the template refuses the messages."""
        kwargs = {} if self.enable_thinking is None else {"enable_thinking": self.enable_thinking}
        try:
            return str(
                self.tokenizer.apply_chat_template(
                    [message.as_dict() for message in messages],
                    tools=tools,
                    tokenize=False,
                    add_generation_prompt=generation,
                    **kwargs,
                )
            )
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            raise RowError(f"the chat template refuses this row: {error}") from None

    def prepare(self, messages: Sequence[Message]) -> list[Message]:
        """The messages as they are rendered: with the default system message, without reasoning if that is off."""
        result = list(messages)
        if self.default_system and result[0].role != "system":
            result.insert(0, Message("system", self.default_system))
        return without_reasoning(result) if self.enable_thinking is False else result

    def render(self, conversation: Conversation) -> list[Rendering]:
        """One rendering, or several where the template changes turns once they are history.

        Raises RowError where the template refuses or loses something, NothingToLearn where no turn is learned.
        """
        messages = self.prepare(conversation.messages)
        turns = [i for i, m in enumerate(messages) if m.role == "assistant"]
        wanted = {i for i in turns if messages[i].train and not messages[i].empty}
        if self.mask_history:
            wanted &= {turns[-1]}
        if not wanted:
            raise NothingToLearn("the last assistant turn is empty" if self.mask_history else "no turn to learn")
        renderings: list[Rendering] = []
        count = len(messages)
        while wanted:
            rendering, done = self.render_last(messages[:count], conversation.tools, wanted)
            renderings.append(rendering)
            wanted -= done
            count = max(wanted, default=0) + 1
        return renderings[::-1]

    def render_last(self, messages: list[Message], tools: Any, wanted: set[int]) -> tuple[Rendering, set[int]]:
        """Render messages that end with an assistant turn; learn those of `wanted` that are shown faithfully.

        Returns the rendering and the turns it learns (indices into `messages`).
        """
        last = len(messages) - 1
        whole = self._generation_blocks(messages, tools) if self.has_generation else None
        if whole is None:
            whole = self._by_prefixes(messages, tools)
        text, found = whole
        spans, done = [], set()
        for i, (begin, end) in sorted(found.items()):
            end = self._stop(text, begin, end)
            if not self._closed(text, begin, end):
                if i == last:
                    # The template never ends a turn: without an end token the model would not learn to stop.
                    text, end = text[:end] + self.eos, end + len(self.eos)
                else:
                    # What ends the turn is the token that opens the next one.
                    end += self._special_at(text, end)
            if i in wanted:
                done.add(i)
                _check_nothing_lost(messages[i], text[begin:end])
            spans.append((begin, end, i in wanted))
        for message in messages:
            if message.role != "assistant" and not _shown(message.content.strip(), text):
                fix = "choose a template that has this role, for example `template: chatml`"
                raise RowError(f"the chat template does not show the text of a {message.role} turn", fix=fix)
        if tools and (lost := [t["function"]["name"] for t in tools if t["function"]["name"] not in text]):
            raise RowError(
                f"the chat template does not show the tool {lost[0]!r}",
                fix="name a template that renders tools, for example `template: chatml`",
            )
        return Rendering(text, spans, messages), done

    def _by_prefixes(self, messages: list[Message], tools: Any) -> tuple[str, dict[int, tuple[int, int]]]:
        text = self.text(messages, tools)
        found = {}
        for i, message in enumerate(messages):
            if message.role != "assistant":
                continue
            final = i == len(messages) - 1
            through = text if final else self.text(messages[: i + 1], tools)
            begin = self._begin(messages[: i + 1], tools, through)
            if text.startswith(through):
                found[i] = (begin, len(through))
        return text, found

    def _begin(self, messages: list[Message], tools: Any, through: str) -> int:
        """Where the last of `messages` begins in `through`, their rendering."""
        prompt = self.text(messages[:-1], tools, generation=True)
        if through.startswith(prompt):
            return len(prompt)
        # The prompt holds more than what precedes an answer in history (`<think>`): find the place of the content.
        probe = Message("assistant", _PROBE)
        shown = self.text([*messages[:-1], probe], tools)
        begin = shown.find(_PROBE)
        if begin < 0 or through[:begin] != shown[:begin]:
            raise RowError("the chat template gives no way to find where the assistant's turn begins")
        return begin

    def _generation_blocks(self, messages: list[Message], tools: Any) -> tuple[str, dict[int, tuple[int, int]]] | None:
        """Ranges from the template's own `{% generation %}` blocks; None if they are not one for each turn."""
        from transformers.utils.chat_template_utils import render_jinja_template

        kwargs = {} if self.enable_thinking is None else {"enable_thinking": self.enable_thinking}
        try:
            rendered: Any = render_jinja_template(
                conversations=[[m.as_dict() for m in messages]],
                tools=tools,
                chat_template=self.tokenizer.get_chat_template(None, tools),
                return_assistant_tokens_mask=True,
                **{**self.tokenizer.special_tokens_map, **kwargs},
            )
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            raise RowError(f"the chat template refuses this row: {error}") from None
        turns = [i for i, m in enumerate(messages) if m.role == "assistant"]
        texts, blocks = rendered  # one text, and one list of (begin, end) characters, for each conversation
        ranges = [(int(block[0]), int(block[1])) for block in blocks[0]]
        if len(ranges) != len(turns):
            return None
        text, found = texts[0], {}
        for i, (begin, end) in zip(turns, ranges, strict=True):
            # A block may leave out the token that ends the turn; the model has to learn it.
            if not self._closed(text, begin, self._stop(text, begin, end)):
                end += self._special_at(text, end)
            found[i] = (begin, end)
        return text, found

    def _special_at(self, text: str, position: int) -> int:
        """Length of the special token that stands at a place, or 0."""
        return next((len(s) for s in self.specials if text.startswith(s, position)), 0)

    def _closed(self, text: str, begin: int, end: int) -> bool:
        return any(text.endswith(s, begin, end) for s in self.specials)

    def _stop(self, text: str, begin: int, end: int) -> int:
        """The turn's end without the white space a template writes after its end token."""
        stripped = begin + len(text[begin:end].rstrip())
        return stripped if self._closed(text, begin, stripped) else end


def special_tokens(tokenizer: Any) -> tuple[str, ...]:
    """Texts of the tokenizer's special tokens, the longest first."""
    texts = set(getattr(tokenizer, "all_special_tokens", []))
    for token in getattr(tokenizer, "added_tokens_decoder", {}).values():
        if getattr(token, "special", False):
            texts.add(str(token.content))
    return tuple(sorted((t for t in texts if t), key=lambda t: (-len(t), t)))


def _shown(part: str, text: str) -> bool:
    """Whether a turn's text is in a rendering, as it is or as a JSON string (Mistral's tool results)."""
    return part in text or json.dumps(part, ensure_ascii=False)[1:-1] in text


def _check_nothing_lost(message: Message, shown: str) -> None:
    """Every part of a learned turn must be in what the template shows of it."""
    thought = THINK.match(message.content)
    parts = [("text", THINK.sub("", message.content).strip())]
    if thought:
        parts.append(("reasoning", thought.group(1).strip()))
    if message.reasoning_content:
        parts.append(("reasoning", message.reasoning_content.strip()))
    parts += [("tool calls", call["function"]["name"]) for call in message.tool_calls or []]
    for what, part in parts:
        if part and part not in shown:
            fix = {
                "text": "look at the rendering with `lumen data inspect`",
                "reasoning": "name a template that renders it (`template: qwen3`), or set enable_thinking: false",
                "tool calls": "name a template that renders tool calls, for example `template: chatml`",
            }[what]
            raise RowError(f"the chat template does not show the {what} of an assistant turn", fix=fix)


# --- tokens ----------------------------------------------------------------------------------------------------------


def encode_texts(tokenizer: Any, texts: list[str]) -> list[np.ndarray]:
    """Ids of rendered texts, int32; no special token is added, because the template wrote them."""
    if not texts:
        return []
    return [_one_bos(tokenizer, np.asarray(ids, np.int32)) for ids in _ids(tokenizer, texts)]


def _ids(tokenizer: Any, texts: list[str]) -> list[list[int]]:
    return list(tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"])


def _one_bos(tokenizer: Any, ids: np.ndarray) -> np.ndarray:
    bos = tokenizer.bos_token_id
    doubled = bos is not None and len(ids) > 1 and ids[0] == bos and ids[1] == bos
    return ids[1:] if doubled else ids


def prompt_ids(
    tokenizer: Any,
    messages: list[dict[str, Any]],
    *,
    tools: list[dict[str, Any]] | None = None,
    enable_thinking: bool | None = True,
    default_system: str | None = None,
) -> list[int]:
    """Token ids of a chat up to where the assistant answers: the ids that training saw, for chat and serving.

    messages: OpenAI's dictionaries with role and content.
    """
    renderer = ChatRenderer(tokenizer, enable_thinking=enable_thinking, default_system=default_system)
    turns = [
        Message(m["role"], m.get("content") or "", m.get("tool_calls"), m.get("reasoning_content")) for m in messages
    ]
    text = renderer.text(renderer.prepare(turns), tools, generation=True)
    return [int(i) for i in encode_texts(tokenizer, [text])[0]]


def encode_plain(tokenizer: Any, texts: Sequence[str]) -> list[np.ndarray]:
    """Ids of pretraining texts, int32: begin token where this tokenizer writes one, the text, the end token."""
    eos = tokenizer.eos_token_id
    results = []
    for ids in tokenizer(list(texts), return_attention_mask=False, verbose=False)["input_ids"] if texts else []:
        tokens = np.asarray(ids, np.int32)
        if eos is not None and (not len(tokens) or tokens[-1] != eos):
            tokens = np.append(tokens, np.int32(eos))
        results.append(_one_bos(tokenizer, tokens))
    return results


def encode_renderings(tokenizer: Any, renderings: Sequence[Rendering]) -> list[tuple[np.ndarray, np.ndarray]]:
    """(ids int32 [T], learned bool [T]) of each rendering."""
    if not renderings:
        return []
    if not getattr(tokenizer, "is_fast", False):
        return [_in_parts(tokenizer, rendering) for rendering in renderings]
    encoded = tokenizer(
        [rendering.text for rendering in renderings],
        add_special_tokens=False,
        return_offsets_mapping=True,
        return_attention_mask=False,
        verbose=False,  # its warning about model_max_length is not true of what is cut afterwards
    )
    results = []
    for rendering, ids, offsets in zip(renderings, encoded["input_ids"], encoded["offset_mapping"], strict=True):
        tokens = np.asarray(ids, np.int32)
        learned = _by_offsets(rendering, np.asarray(offsets, np.int64).reshape(-1, 2))
        if learned is None:
            tokens, learned = _in_parts(tokenizer, rendering)
        dropped = len(tokens) - len(_one_bos(tokenizer, tokens))
        results.append((tokens[dropped:], learned[dropped:]))
    return results


def _by_offsets(rendering: Rendering, offsets: np.ndarray) -> np.ndarray | None:
    """Learned tokens, or None where a token reaches over the beginning of a learned turn.

    Byte-level tokenizers leave white space out of their offsets, so a token lies before a place when it *ends* at or
    before it; and if the last such token ends earlier, white space before the place hides in the token after it.
    """
    begins, ends = offsets[:, 0], offsets[:, 1]
    learned = np.zeros(len(offsets), bool)
    for begin, end, wanted in rendering.spans:
        if not wanted:
            continue
        inside = (ends > begin) & (ends <= end)
        first = int(np.argmax(inside)) if inside.any() else len(offsets)
        if first < len(offsets) and begins[first] < begin:
            return None
        if first > 0 and ends[first - 1] < begin:
            return None
        learned |= inside
    return learned


def _in_parts(tokenizer: Any, rendering: Rendering) -> tuple[np.ndarray, np.ndarray]:
    """Tokenise text cut at the edges of the learned turns: slow tokenizers, and tokens that reach over an edge."""
    texts, flags, position = [], [], 0
    for begin, end, wanted in rendering.spans:
        if wanted:
            texts += [rendering.text[position:begin], rendering.text[begin:end]]
            flags += [False, True]
            position = end
    texts.append(rendering.text[position:])
    flags.append(False)
    kept = [(text, flag) for text, flag in zip(texts, flags, strict=True) if text]
    parts = _ids(tokenizer, [text for text, _ in kept])
    ids = np.concatenate([np.asarray(part, np.int32) for part in parts])
    learned = np.concatenate([np.full(len(part), flag) for part, (_, flag) in zip(parts, kept, strict=True)])
    return ids, learned
