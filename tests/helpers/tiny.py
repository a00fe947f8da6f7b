"""Tiny random models of many architectures and a byte-level tokenizer with a chat template, all made in memory."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

CHATML = (
    "{%- if tools %}{{ '<|im_start|>tools\\n' }}{%- for tool in tools %}{{ tool | tojson }}{{ '\\n' }}{%- endfor %}"
    "{{ '<|im_end|>\\n' }}{%- endif %}"
    "{%- for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{%- if message['content'] %}{{ message['content'] }}{%- endif %}"
    "{%- if message['tool_calls'] %}{%- for call in message['tool_calls'] %}"
    "{{ '<tool_call>' + (call['function'] | tojson) + '</tool_call>' }}{%- endfor %}{%- endif %}"
    "{{ '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{%- endif %}"
)
_CORPUS = [
    "The capital of France is Paris. Hello, how are you today? I am fine, thank you.",
    "user assistant system 你好,今天天气很好。谢谢!",
    "one two three four five six seven eight nine ten",
]


@functools.cache
def _byte_level() -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    return tokenizer.to_str()


def tiny_tokenizer(*, pad: bool = True, template: bool = True) -> PreTrainedTokenizerFast:
    """Byte-level BPE of about 320 tokens with a ChatML template; covers Chinese and emoji byte by byte.

    pad:      False leaves the tokenizer without a padding token, as many published ones are.
    template: False leaves it without a chat template, as base models are.
    """
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_byte_level()),
        eos_token="<|im_end|>",
        unk_token="<|endoftext|>",
        pad_token="<|pad|>" if pad else None,
        model_max_length=512,
    )
    tokenizer.chat_template = CHATML if template else None
    return tokenizer


_SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
}
_MOE: dict[str, Any] = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
TINY_ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "gemma2": {"query_pre_attn_scalar": 8, "sliding_window": 16},
    "gemma3_text": {"query_pre_attn_scalar": 8, "sliding_window": 16},
    "mistral": {"sliding_window": None},
    "phi3": {"pad_token_id": 3},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 512, "n_inner": 64},
    "mixtral": _MOE,
    "qwen3_moe": _MOE,
}
"""Architecture (`model_type`) → what its config needs beyond the small sizes."""


def tiny_model(architecture: str, *, seed: int = 0, dtype: torch.dtype = torch.float32, **overrides: Any) -> Any:
    """A random model with 2 layers of hidden size 32 whose vocabulary is `tiny_tokenizer`'s."""
    sizes = {} if architecture == "gpt2" else _SMALL
    settings = {
        "vocab_size": len(tiny_tokenizer()), "bos_token_id": None, "eos_token_id": 2, "pad_token_id": 3,
        **sizes, **TINY_ARCHITECTURES[architecture], **overrides,
    }  # fmt: skip
    config = AutoConfig.for_model(architecture, **settings)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config)
    return model.to(dtype).eval()


def tiny_llama(*, seed: int = 0, dtype: torch.dtype = torch.float32, **overrides: Any) -> Any:
    """`tiny_model("llama")`: LlamaForCausalLM, 2 layers, hidden 32; `tie_word_embeddings=True` and others as wished."""
    return tiny_model("llama", seed=seed, dtype=dtype, **overrides)


def save_tiny(directory: Path, model: Any = None, tokenizer: Any = None) -> Path:
    """Write a model and tokenizer (tiny llama by default) as a Hugging Face directory and return it."""
    (model if model is not None else tiny_llama()).save_pretrained(directory)
    (tokenizer if tokenizer is not None else tiny_tokenizer()).save_pretrained(directory)
    return Path(directory)
