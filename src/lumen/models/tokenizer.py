"""The tokenizer, its padding token, and tokens that a run adds.

**Padding** must never be the end-of-text token: a loss mask or a stop rule that looks at ids would then learn nothing
about ending.  Lumen's own masks come from the data, never from comparing ids, so any other token will do; one that is
reserved or unused is best, because then nothing changes its meaning and the vocabulary keeps its size.

**Added tokens** need rows in the embedding and the head.  A random row is far outside the cloud of trained rows and
shifts every softmax; the mean of the trained rows is the neutral start (Hewitt 2021, "Initializing new word embeddings
for pretrained language models": the new token then has at most average probability).
"""

from __future__ import annotations

import re
from typing import Any

import torch

from lumen.core import ModelError, note
from lumen.models.config import ModelConfig
from lumen.models.layers import embedding_name, head_name, is_tied
from lumen.models.source import Source, hub_arguments

_PAD_NAMES = (
    "<|finetune_right_pad_id|>", "<pad>", "<|pad|>", "[PAD]", "<PAD>", "<|padding|>", "<|vision_pad|>", "<|fim_pad|>",
    "<fim_pad>", "<|endoftext|>", "<|reserved_special_token_0|>", "<unused0>", "<|dummy_0|>", "<|extra_0|>",
)  # fmt: skip
_UNUSED = re.compile(r"(unused|reserved|placeholder|dummy|extra)[\w-]*\d+", re.IGNORECASE)
NEW_PAD = "<|pad|>"


def load_tokenizer(source: Source, config: ModelConfig) -> Any:
    """The model's own tokenizer, with padding on the right; chat template and special tokens as it has them.

    Raises ModelError where there is none or it cannot be read.
    """
    from transformers import AutoTokenizer

    arguments = hub_arguments(source, config)
    if source.gguf_file:
        arguments["gguf_file"] = source.gguf_file
    try:
        tokenizer = AutoTokenizer.from_pretrained(source.path, **arguments)
    except Exception as error:
        raise ModelError(
            f"the tokenizer of {source} cannot be loaded: {_first_line(error)}",
            where="model_name_or_path",
            fix="the folder needs tokenizer.json (or the slow tokenizer's files) and tokenizer_config.json",
        ) from error
    tokenizer.padding_side = "right"
    return tokenizer


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def end_token_ids(model: Any, tokenizer: Any) -> set[int]:
    """Every id that ends a turn or a text: the tokenizer's eos and those of the model's generation config."""
    ids: set[int] = set()
    for value in (
        tokenizer.eos_token_id,
        getattr(getattr(model, "generation_config", None), "eos_token_id", None),
        getattr(getattr(model, "config", None), "eos_token_id", None),
    ):
        ids |= set(value) if isinstance(value, list | tuple) else ({value} if value is not None else set())
    return ids


def vocabulary_rows(model: Any) -> int:
    """Rows of the input embedding."""
    return model.get_input_embeddings().weight.shape[0]


def ensure_pad(model: Any, tokenizer: Any) -> str:
    """Give the tokenizer a padding token that ends nothing, and tell the model's configs; returns the token.

    In order: its own, if it ends nothing; a known padding name; a reserved or unused token; a new token in a spare
    row; unk or bos, if they end nothing; a new token with a new row, the only case in which the model grows.
    """
    ends = end_token_ids(model, tokenizer)
    chosen = tokenizer.pad_token if tokenizer.pad_token_id not in ends | {None} else None
    if chosen is None:
        chosen = _existing_pad(tokenizer, ends)
        if chosen is not None:
            tokenizer.pad_token = chosen
        else:
            tokenizer.add_special_tokens({"pad_token": NEW_PAD})
            chosen = NEW_PAD
            if len(tokenizer) > vocabulary_rows(model):
                resize(model, tokenizer)
                note(f"no existing token can pad: {NEW_PAD} was added and the embedding grew by a row")
    pad_id = tokenizer.pad_token_id
    model.config.pad_token_id = pad_id
    if getattr(model, "generation_config", None) is not None:
        model.generation_config.pad_token_id = pad_id
    embedding = model.get_input_embeddings()
    # nn.Embedding drops the gradient of padding_idx; left at the old pad (often eos) that row would never train.
    if getattr(embedding, "padding_idx", None) is not None:
        embedding.padding_idx = pad_id
    return chosen


def _existing_pad(tokenizer: Any, ends: set[int]) -> str | None:
    vocabulary = tokenizer.get_vocab()

    def usable(token: Any) -> bool:
        return isinstance(token, str) and vocabulary.get(token) is not None and vocabulary[token] not in ends

    for token in _PAD_NAMES:
        if usable(token):
            return token
    added = {str(token): index for index, token in tokenizer.added_tokens_decoder.items()}
    unused = sorted((index, token) for token, index in added.items() if _UNUSED.search(token) and usable(token))
    if unused:
        return unused[0][1]
    return next((t for t in (tokenizer.unk_token, tokenizer.bos_token) if usable(t)), None)


def add_tokens(model: Any, tokenizer: Any, config: ModelConfig) -> list[str]:
    """Add `add_tokens` and `add_special_tokens`, resize where needed; returns the tokens that are new.

    New rows, spare rows that now have a meaning included, start at the mean of the old tokens' rows.  With
    `resize_vocab` the model is resized to the tokenizer's length also without new tokens.
    """
    old = len(tokenizer)
    known = tokenizer.get_vocab()
    plain = [t for t in dict.fromkeys(config.add_tokens or []) if t not in known]
    special = [t for t in dict.fromkeys(config.add_special_tokens or []) if t not in known and t not in plain]
    already = [t for t in (config.add_tokens or []) + (config.add_special_tokens or []) if t in known]
    if already:
        note(f"already in the vocabulary, not added again: {', '.join(already)}")
    if plain:
        tokenizer.add_tokens(plain)
    if special:
        tokenizer.add_tokens(special, special_tokens=True)
    rows = vocabulary_rows(model)
    if len(tokenizer) > rows:
        if not config.resize_vocab:
            note(f"the vocabulary grows from {rows} to {len(tokenizer)} rows for the added tokens (resize_vocab: true)")
        resize(model, tokenizer, trained=old)
    elif config.resize_vocab and len(tokenizer) < rows:
        note(f"resize_vocab: the model keeps its {rows} rows, more than the tokenizer's {len(tokenizer)}: none is lost")
    if len(tokenizer) > old:
        _mean_rows(model, old, len(tokenizer))
    return plain + special


def resize(model: Any, tokenizer: Any, *, trained: int | None = None) -> None:
    """Grow embedding and head to the tokenizer's length; new rows are the mean of the first `trained` rows."""
    rows = vocabulary_rows(model)
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    _mean_rows(model, min(rows, trained if trained is not None else rows), len(tokenizer))


@torch.no_grad()
def _mean_rows(model: Any, trained: int, end: int) -> None:
    """Set rows [trained, end) of embedding and head (and the head's bias) to the mean of rows [0, trained), in fp32."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    tensors = [embedding.weight]
    if head is not None and not is_tied(model):
        tensors.append(head.weight)
    if head is not None and getattr(head, "bias", None) is not None:
        tensors.append(head.bias)
    for tensor in tensors:
        tensor[trained:end] = tensor[:trained].float().mean(dim=0).to(tensor.dtype)


def vocabulary_modules(model: Any) -> list[str]:
    """Leaf names of what must be trained and saved whole when the vocabulary grew: embedding, and head if it has one.

    With tied weights the embedding alone: PEFT ties the head's copy to it (`ensure_weight_tying`).
    """
    names = [embedding_name(model)]
    head = head_name(model)
    if head is not None and not is_tied(model):
        names.append(head)
    return [name.rpartition(".")[2] for name in names]
