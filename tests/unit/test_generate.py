"""Sampling against transformers' own generate, streams of whole characters, stops, batches, the sample model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pydantic import ValidationError
from tests.helpers import TINY_ARCHITECTURES, smollm2_gguf, tiny_llama, tiny_model, tiny_tokenizer
from transformers import LogitsProcessorList, RepetitionPenaltyLogitsProcessor
from transformers.generation.logits_process import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from lumen.core import DataError, ModelError
from lumen.data.templates import stop_token_ids
from lumen.generate.choose import penalized, probabilities
from lumen.generate.config import GenerateConfig
from lumen.generate.sampler import encode, generate
from lumen.generate.stream import TextStream
from lumen.models.config import ModelConfig
from lumen.models.load import load_model

GREEDY = GenerateConfig(do_sample=False, max_new_tokens=12)


@pytest.mark.parametrize("architecture", TINY_ARCHITECTURES)
def test_greedy_equals_transformers_and_batches_equal_single_rows(architecture: str) -> None:
    model, tokenizer = tiny_model(architecture), tiny_tokenizer()
    prompts = ["Hello", "The capital of France is", "one two three four five six seven eight nine ten one two three"]
    together = generate(model, tokenizer, prompts, GREEDY, batch_size=3)
    for prompt, answer in zip(prompts, together, strict=True):
        alone = generate(model, tokenizer, prompt, GREEDY)[0]
        assert answer.token_ids == alone.token_ids
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        want = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)
        assert alone.token_ids == want[0, ids.shape[1] :].tolist()[: len(alone.token_ids)]
        assert alone.prompt_tokens == ids.shape[1]


def test_probabilities_equal_transformers_warpers() -> None:
    logits = torch.randn(50, generator=torch.Generator().manual_seed(0)) * 3
    seen = [3, 7, 7, 20]
    config = GenerateConfig(temperature=0.7, top_k=12, top_p=0.8, repetition_penalty=1.3)
    warpers = LogitsProcessorList(
        [
            RepetitionPenaltyLogitsProcessor(1.3),
            TemperatureLogitsWarper(0.7),
            TopKLogitsWarper(12),
            TopPLogitsWarper(0.8),
        ]
    )
    want = warpers(torch.tensor([seen]), logits[None].clone())[0].softmax(-1)
    torch.testing.assert_close(probabilities(penalized(logits, seen, 1.3), config), want)


def test_sampling_follows_the_seed_and_not_the_batch() -> None:
    model, tokenizer = tiny_llama(), tiny_tokenizer()
    config = GenerateConfig(max_new_tokens=8, temperature=1.0, top_p=1.0, top_k=0)
    prompts = ["a", "bb b", "ccc"]
    first = [g.token_ids for g in generate(model, tokenizer, prompts, config, seed=1, batch_size=1)]
    again = [g.token_ids for g in generate(model, tokenizer, prompts, config, seed=1, batch_size=3)]
    other = [g.token_ids for g in generate(model, tokenizer, prompts, config, seed=2)]
    assert first == again != other
    cold = GenerateConfig(max_new_tokens=8, temperature=0)
    assert (
        generate(model, tokenizer, "a", cold)[0].token_ids == generate(model, tokenizer, "a", GREEDY)[0].token_ids[:8]
    )


def test_stream_gives_whole_characters_only() -> None:
    tokenizer = tiny_tokenizer()
    text = "你好,世界! 🎉👩‍👩‍👧 été — fin"
    stream, pieces = TextStream(tokenizer), []
    ids = tokenizer(text)["input_ids"]
    assert len(ids) > len(text)  # characters are split into bytes
    for token in ids:
        pieces.append(stream.push(token))
    pieces.append(stream.finish())
    assert "".join(pieces) == text == stream.text
    assert not any("�" in piece for piece in pieces)


def test_a_character_cut_off_by_the_limit_is_shown_as_broken_at_the_end_only() -> None:
    tokenizer = tiny_tokenizer()
    ids = tokenizer("ok 🎉")["input_ids"][:-1]
    stream = TextStream(tokenizer)
    assert "�" not in "".join(stream.push(i) for i in ids)
    assert stream.finish() == "�"


@pytest.mark.parametrize("stop", ["\n###", "END", "好世"])
def test_stop_strings_never_leak(stop: str) -> None:
    tokenizer = tiny_tokenizer()
    text = f"one \n## two EN 你好 {stop} rest"
    stream = TextStream(tokenizer, stop_strings=["zzz", stop])
    pieces = [stream.push(i) for i in tokenizer(text)["input_ids"]]
    pieces.append(stream.finish())
    assert "".join(pieces) == text.split(stop)[0] and stream.stopped


def test_text_that_only_began_a_stop_string_is_given_at_the_end() -> None:
    stream = TextStream(tiny_tokenizer(), stop_strings=["STOP"])
    for token in tiny_tokenizer()("done ST")["input_ids"]:
        stream.push(token)
    assert stream.text == "done " and stream.finish() == "ST" and stream.text == "done ST"


class Scripted(torch.nn.Module):
    """A model that says a given sequence of tokens, whatever it reads."""

    def __init__(self, model: Any, script: list[int]) -> None:
        super().__init__()
        self.inner, self.script, self.said = model, script, 0
        self.config, self.generation_config = model.config, model.generation_config

    def get_input_embeddings(self) -> Any:
        return self.inner.get_input_embeddings()

    def forward(self, **inputs: Any) -> Any:
        output = self.inner(**inputs)
        output.logits = torch.zeros_like(output.logits)
        output.logits[:, -1, self.script[self.said]] = 100.0
        self.said += 1
        return output


def test_ends_at_the_end_of_turn_and_streams_what_it_returns() -> None:
    tokenizer = tiny_tokenizer()
    script = [*tokenizer("你好 🎉")["input_ids"], tokenizer.convert_tokens_to_ids("<|im_end|>"), 5, 5]
    got: list[str] = []
    model = Scripted(tiny_llama(), script).train()
    answer = generate(
        model, tokenizer, [{"role": "user", "content": "hi"}], GenerateConfig(max_new_tokens=40),
        on_text=lambda row, piece: got.append(piece),
    )[0]  # fmt: skip
    assert answer.text == "你好 🎉" == "".join(got)
    assert answer.finish_reason == "stop" and answer.token_ids == script[:-2]
    assert model.training and model.inner.training


def test_the_templates_end_token_stops_also_where_it_is_not_eos() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = "<|endoftext|>"
    assert 2 in stop_token_ids(tokenizer)
    model = tiny_llama(eos_token_id=0)
    model.generation_config.eos_token_id = 0
    answer = generate(Scripted(model, [60, 2, 61]), tokenizer, "x", GenerateConfig(max_new_tokens=3))[0]
    assert answer.token_ids == [60, 2]


def test_stop_string_ends_and_limit_ends() -> None:
    tokenizer = tiny_tokenizer()
    script = tokenizer("one. two. three.")["input_ids"]
    config = GenerateConfig(max_new_tokens=len(script), stop_strings=[" two"])
    answer = generate(Scripted(tiny_llama(), script), tokenizer, "x", config)[0]
    assert answer.text == "one." and answer.finish_reason == "stop"
    answer = generate(Scripted(tiny_llama(), script), tokenizer, "x", GenerateConfig(max_new_tokens=3))[0]
    assert answer.finish_reason == "length" and len(answer.token_ids) == 3


def test_conversations_are_the_tokenizers_own_template() -> None:
    tokenizer = tiny_tokenizer()
    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "你好"}]
    want = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
    assert encode(tokenizer, messages) == want


def test_what_cannot_be_says_so() -> None:
    model, tokenizer = tiny_llama(), tiny_tokenizer()
    for keys in ({"temperature": -1}, {"top_p": 0}, {"top_k": -2}, {"repetition_penalty": 0}, {"max_new_tokens": 0}):
        with pytest.raises(ValidationError, match=next(iter(keys))):
            GenerateConfig(**keys)
    with pytest.raises(DataError, match="empty"):
        generate(model, tokenizer, "")
    with pytest.raises(ModelError, match="context is 512"):
        generate(model, tokenizer, [7] * 512)
    with pytest.raises(DataError, match="no chat template"):
        generate(model, tiny_tokenizer(template=False), [{"role": "user", "content": "hi"}])
    assert generate(model, tokenizer, [[7] * 508], GREEDY)[0].finish_reason == "length"


def test_the_sample_model_knows_the_capital_of_france() -> None:
    """The one load of real weights in the unit tests: GGUF → plain weights, its tokenizer, its template, greedy."""
    loaded = load_model(ModelConfig(model_name_or_path=str(smollm2_gguf())), dtype=torch.float32, device="cpu")
    assert {p.dtype for p in loaded.model.parameters()} == {torch.float32}
    assert loaded.model.lm_head.weight is loaded.model.model.embed_tokens.weight
    assert getattr(loaded.model.config, "quantization_config", None) is None
    assert loaded.tokenizer.pad_token_id not in loaded.end_token_ids
    question = [{"role": "user", "content": "What is the capital of France?"}]
    answer = generate(loaded.model, loaded.tokenizer, question, GenerateConfig(do_sample=False, max_new_tokens=20))[0]
    assert answer.text == "The capital of France is Paris." and answer.finish_reason == "stop"
