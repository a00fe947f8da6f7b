"""A tokenizer as GGUF's `tokenizer.ggml.*` keys.

llama.cpp has two families of BPE, and the tokens' ids must be the same there as in training:

    gpt2    byte-level BPE.  Merges are stored; what splits the text before them (a regular expression) is not: `pre`
            names one that llama.cpp has built in.  Which one is found by what the tokenizer *does*: a test text is
            tokenised and the ids are hashed, and the hash is looked up.  A tokenizer that is not in the table raises;
            guessing would split numbers or contractions otherwise and quietly cost quality.
    llama   SentencePiece BPE with byte fallback.  Stored are scores: of two possible merges the one whose result scores
            higher comes first.  Scores are minus the rank of the merge, which is the same order.

Every token has a type.  Special tokens are *control* tokens, so they are never made from text that a user types and
`<|im_start|>` stays one token; other added tokens are *user defined*; rows of the embedding without a token are
*unused*.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from functools import cache
from hashlib import sha256
from importlib import resources
from typing import Any

from lumen.core import ModelError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
_BYTE = re.compile(r"<0x[0-9A-F]{2}>")
_LOOKS_SPECIAL = re.compile(r"<pad>|<mask>|<2mass>|\[@BOS@\]|<\|.*\|>|<｜.*｜>|<unused.*>", re.DOTALL)
_UNSEEN = -1000.0


@dataclass
class Vocabulary:
    """model: gpt2 or llama.  pre: name of the splitting.  types: one of the six per token.  ids: special tokens."""

    model: str
    pre: str
    tokens: list[str]
    types: list[int]
    merges: list[str] | None = None
    scores: list[float] | None = None
    ids: dict[str, int] = field(default_factory=dict)
    add_bos: bool = False
    add_eos: bool = False
    space_prefix: bool | None = None
    chat_template: str | None = None


@cache
def _table() -> dict[str, Any]:
    """llama.cpp's test text, and hash → name (facts of its converter, MIT licence)."""
    text = resources.files("lumen.export").joinpath("pretokenizers.json").read_text(encoding="utf-8")
    return json.loads(text)


def pre_tokenizer(tokenizer: Any) -> str:
    """llama.cpp's name of the splitting.  Raises ModelError for one that it does not know."""
    table = _table()
    digest = sha256(str(tokenizer.encode(table["text"])).encode()).hexdigest()
    name = table["names"].get(digest)
    if name is None:
        raise ModelError(
            f"llama.cpp's name of this tokenizer's pre-tokenizer is not known (hash {digest[:16]}…, "
            f"{type(tokenizer).__name__} of {len(tokenizer)} tokens)",
            where="export_pre_tokenizer",
            fix="if you know that llama.cpp splits text as this tokenizer does under a name, give it: "
            "export_pre_tokenizer: qwen2 (or llama-bpe, gpt-2, smollm, tekken, …)",
        )
    return str(name)


def vocabulary(tokenizer: Any, rows: int, *, end_ids: set[int] = frozenset(), pre: str | None = None) -> Vocabulary:  # type: ignore[assignment]
    """The tokenizer for a model with `rows` embedding rows.

    end_ids: every id that ends a turn or a text; what is not eos becomes the end-of-turn token.
    pre:     the user's own name of the pre-tokenizer.
    Raises ModelError for a tokenizer that GGUF cannot express.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    state = json.loads(backend.to_str()) if backend is not None else {}
    model = state.get("model") or {}
    if model.get("type") != "BPE":
        raise ModelError(
            f"GGUF export writes BPE tokenizers, not {model.get('type') or type(tokenizer).__name__}",
            where="tokenizer.json",
            fix="a model with a byte-level or SentencePiece BPE tokenizer, or a directory with tokenizer.json",
        )
    merges = [m.split(" ", 1) if isinstance(m, str) else m for m in model.get("merges") or []]
    by_id = {index: token for token, index in tokenizer.get_vocab().items()}
    if max(by_id) >= rows:
        raise ModelError(
            f"the tokenizer has ids up to {max(by_id)}, the embedding {rows} rows",
            where="tokenizer.json",
            fix="add_tokens with resize_vocab: true grows the embedding",
        )
    sentencepiece = bool(model.get("byte_fallback"))
    tokens, types = _tokens(tokenizer, by_id, rows, sentencepiece)
    found = Vocabulary("llama" if sentencepiece else "gpt2", "default", tokens, types)
    if sentencepiece:
        found.scores = _scores(by_id, types, merges)
        found.space_prefix = "".join(tokenizer.tokenize("a")[:1]).startswith("▁")
    else:
        found.pre = pre or pre_tokenizer(tokenizer)
        found.merges = [" ".join(part.replace(" ", "Ġ") for part in pair) for pair in merges]
    found.ids = _special_ids(tokenizer, end_ids)
    plain = tokenizer("a")["input_ids"]
    found.add_bos = tokenizer.bos_token_id is not None and plain[:1] == [tokenizer.bos_token_id]
    found.add_eos = tokenizer.eos_token_id is not None and len(plain) > 1 and plain[-1] == tokenizer.eos_token_id
    template = tokenizer.chat_template
    found.chat_template = template.get("default") if isinstance(template, dict) else template
    return found


def _tokens(tokenizer: Any, by_id: dict[int, str], rows: int, sentencepiece: bool) -> tuple[list[str], list[int]]:
    added = tokenizer.added_tokens_decoder
    special = set(tokenizer.all_special_ids)
    tokens, types = [], []
    for index in range(rows):
        token = by_id.get(index)
        if token is None:
            tokens.append(f"[PAD{index}]")
            types.append(UNUSED)
            continue
        entry = added.get(index)
        if sentencepiece and index == tokenizer.unk_token_id:
            kind = UNKNOWN
        elif index in special or (entry is not None and (entry.special or _LOOKS_SPECIAL.fullmatch(token))):
            kind = CONTROL
        elif entry is not None:
            kind = USER_DEFINED
            token = token.replace("▁", " ")
        elif sentencepiece and _BYTE.fullmatch(token):
            kind = BYTE
        else:
            kind = NORMAL
        tokens.append(token)
        types.append(kind)
    return tokens, types


def _scores(by_id: dict[int, str], types: list[int], merges: list[list[str]]) -> list[float]:
    """Minus the rank of the first merge that makes the token; normal tokens that no merge makes come last."""
    rank: dict[str, int] = {}
    for position, (left, right) in enumerate(merges):
        rank.setdefault(left + right, position)
    last = len(merges)
    return [
        -float(rank.get(by_id[i], last)) if kind == NORMAL else (_UNSEEN if kind != BYTE else 0.0)
        for i, kind in enumerate(types)
    ]


def _special_ids(tokenizer: Any, end_ids: set[int]) -> dict[str, int]:
    names = {"bos": "bos_token_id", "eos": "eos_token_id", "unknown": "unk_token_id", "padding": "pad_token_id"}
    ids = {name: getattr(tokenizer, attribute) for name, attribute in names.items()}
    found = {name: int(value) for name, value in ids.items() if value is not None}
    more = sorted(end_ids - {found.get("eos")})
    if more:
        template = str(tokenizer.chat_template or "")
        in_template = [i for i in more if tokenizer.convert_ids_to_tokens(i) in template]
        found["eot"] = (in_template or more)[0]
    return found
