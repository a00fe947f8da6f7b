"""How text is sampled (LLaMA-Factory's names and defaults)."""

from __future__ import annotations

from lumen.core import Config, Count, NonNegative, Positive, PositiveShare, Size


class GenerateConfig(Config):
    """Sampling for chat, generate and eval."""

    do_sample: bool = True
    """Sample; false: greedy. Default: true."""

    temperature: NonNegative = 0.95
    """Divides the logits; 0 is greedy. Default: 0.95."""

    top_p: PositiveShare = 0.7
    """Smallest set of tokens whose probability reaches this. Default: 0.7."""

    top_k: Size = 50
    """Only the k likeliest tokens; 0: all. Default: 50."""

    max_new_tokens: Count = 1024
    """Tokens to generate at most. Default: 1024."""

    repetition_penalty: Positive = 1.0
    """Above 1: tokens that occurred are less likely. Default: 1."""

    stop_strings: list[str] | None = None
    """Texts that end the answer; they are not part of it. Default: none."""

    skip_special_tokens: bool = True
    """Leave special tokens out of the text. Default: true."""
