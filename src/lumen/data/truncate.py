"""Cutting an example to `cutoff_len` without taking away what makes it one.

Cut at the end, an overlong prompt loses the assistant's header and the model learns to answer nowhere.  So:

1. Turns after those that fit are left out; an answer that reaches over the limit loses its tail, and with it its end
   token, so the model never learns to stop where the text was cut.
2. Where even the first learned turn does not fit, earlier turns that are not learned go first (with `mask_history`).
3. Then the prompt is cut from the inside, in the middle of its longest texts.  Headers, the question's beginning and
   end, and the assistant's header stay.  Of the room that the headers leave, the answer may keep half, or more where
   the prompt needs less; of the rest in the same way the user's and tools' texts half against the system message.

What has no room for any of the answer comes back empty and is dropped and counted by the caller.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from lumen.data.conversation import NothingToLearn, RowError
from lumen.data.render import ChatRenderer, Rendering, encode_renderings

_FIXED, _PROMPT, _SYSTEM = 0, 1, 2


def cut(
    ids: np.ndarray, learned: np.ndarray, rendering: Rendering, renderer: ChatRenderer, tools: Any, cutoff_len: int
) -> tuple[np.ndarray, np.ndarray]:
    """(ids, learned) of at most `cutoff_len` tokens; empty where nothing learned can be kept.

    learned: marks the answers only; prompts that are learned too are marked by the caller afterwards.
    """
    if len(ids) <= cutoff_len or not learned.any():
        return ids[:cutoff_len], learned[:cutoff_len]
    first, stop = _first_run(learned)
    if stop > cutoff_len:
        shorter = _without_oldest(rendering, renderer, tools, cutoff_len)
        if shorter is not None:
            ids, learned, rendering = shorter
            first, stop = _first_run(learned)
    if stop > cutoff_len:
        return _inside(ids, first, stop, rendering, renderer.tokenizer, cutoff_len)
    ids, learned = ids[:cutoff_len], learned[:cutoff_len]
    last = int(np.flatnonzero(learned)[-1]) + 1
    return ids[:last], learned[:last]


def _first_run(learned: np.ndarray) -> tuple[int, int]:
    """Begin and end of the first stretch of learned tokens."""
    first = int(np.argmax(learned))
    gaps = np.flatnonzero(~learned[first:])
    return first, first + int(gaps[0]) if len(gaps) else len(learned)


def _without_oldest(
    rendering: Rendering, renderer: ChatRenderer, tools: Any, cutoff_len: int
) -> tuple[np.ndarray, np.ndarray, Rendering] | None:
    """The rendering with as few as possible of the oldest turns left out, all of them before the first learned one."""
    messages = rendering.messages
    answers = [i for i, m in enumerate(messages) if m.role == "assistant"]
    wanted = [w for _, _, w in rendering.spans]
    if len(answers) != len(wanted) or True not in wanted:
        return None
    first = answers[wanted.index(True)]
    head = messages[:1] if messages[0].role == "system" else []
    starts = [i for i in range(len(head) + 1, first) if messages[i].role == "user"]
    found = None
    for start in starts:
        kept = [*head, *messages[start:]]
        keep = {i - start + len(head) for i, w in zip(answers, wanted, strict=True) if w}
        try:
            shorter, done = renderer.render_last(kept, tools, keep)
        except (RowError, NothingToLearn):
            break
        if done != keep:
            break
        ids, learned = encode_renderings(renderer.tokenizer, [shorter])[0]
        if not learned.any():
            break
        found = ids, learned, shorter
        if _first_run(learned)[1] <= cutoff_len:
            break
    return found


def _inside(
    ids: np.ndarray, first: int, stop: int, rendering: Rendering, tokenizer: Any, cutoff_len: int
) -> tuple[np.ndarray, np.ndarray]:
    """Cut the prompt's texts in their middles and the answer at its tail."""
    texts = _texts(rendering, tokenizer, first)
    removable = sum(end - begin for begin, end, _ in texts)
    room = cutoff_len - (first - removable)
    if room <= 0:
        return ids[:0], np.zeros(0, bool)
    answer = min(stop - first, max(room // 2, room - removable, 1))
    keep = np.ones(first, bool)
    size = {kind: sum(end - begin for begin, end, k in texts if k == kind) for kind in (_PROMPT, _SYSTEM)}
    left = room - answer
    kept = min(size[_PROMPT], max(left // 2, left - size[_SYSTEM]))
    excess = {_PROMPT: size[_PROMPT] - kept, _SYSTEM: max(0, size[_SYSTEM] - (left - kept))}
    for begin, end, kind in sorted(texts, key=lambda t: t[0] - t[1]):  # the longest first
        gone = min(excess[kind], end - begin)
        if gone > 0:
            middle = begin + -(-(end - begin - gone) // 2)
            keep[middle : middle + gone] = False
            excess[kind] -= gone
    prompt = ids[:first][keep]
    result = np.concatenate([prompt, ids[first : first + answer]])
    learned = np.arange(len(result)) >= len(prompt)
    return result, learned


def _texts(rendering: Rendering, tokenizer: Any, first: int) -> list[tuple[int, int, int]]:
    """Token ranges (begin, end, kind) of the messages' own text before token `first`."""
    if not getattr(tokenizer, "is_fast", False):
        return [(first // 4, max(first // 4, first - first // 4), _PROMPT)]
    encoded = tokenizer(rendering.text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    offsets = np.asarray(encoded["offset_mapping"], np.int64).reshape(-1, 2)
    found, position = [], 0
    limit = next((begin for begin, _, wanted in rendering.spans if wanted), 0)
    for message in rendering.messages:
        content = message.content.strip()
        begin = rendering.text.find(content, position, limit) if content else -1
        if begin < 0:
            continue
        position = begin + len(content)
        if message.role == "assistant":
            continue
        inside = np.flatnonzero((offsets[:first, 0] >= begin) & (offsets[:first, 1] <= position))
        inside = inside[offsets[inside, 1] > begin]
        if len(inside):
            kind = _SYSTEM if message.role == "system" else _PROMPT
            found.append((int(inside[0]), int(inside[-1]) + 1, kind))
    return found
