"""Named templates: golden text of one conversation, what ends a turn, and what a tokenizer may lack."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.helpers import tiny_tokenizer

from lumen.core import ConfigError, notes
from lumen.core.log import forget_notes
from lumen.data.conversation import Conversation, Message
from lumen.data.render import ChatRenderer
from lumen.data.templates import FOLDER, TEMPLATES, apply_template, stop_token_ids, template_text

TALK = [("system", "S"), ("user", "U1"), ("assistant", "A1"), ("user", "U2")]
HEADS = {
    "chatml": "<|im_start|>{}\n", "llama3": "<|start_header_id|>{}<|end_header_id|>\n\n",
    "phi4": "<|im_start|>{}<|im_sep|>", "phi3": "<|{}|>\n", "phi4_mini": "<|{}|>", "zephyr": "<|{}|>\n",
    "granite3": "<|start_of_role|>{}<|end_of_role|>",
}  # fmt: skip
ENDS = {
    "chatml": "<|im_end|>\n", "llama3": "<|eot_id|>", "phi4": "<|im_end|>", "phi3": "<|end|>\n", "phi4_mini": "<|end|>",
    "zephyr": "<E>\n", "granite3": "<|end_of_text|>\n",
}  # fmt: skip


def by_roles(name: str, bos: str = "") -> str:
    turns = "".join(HEADS[name].format(role) + text + ENDS[name] for role, text in TALK)
    return bos + turns + HEADS[name].format("assistant")


GOLDEN = {
    "alpaca": "S\n\n### Instruction:\nU1\n\n### Response:\nA1<E>\n\n### Instruction:\nU2\n\n### Response:\n",
    "chatml": by_roles("chatml"),
    "deepseek": "<B>S\n\nUser: U1\n\nAssistant: A1<E>User: U2\n\nAssistant:",
    "deepseek3": "<B>S<｜User｜>U1<｜Assistant｜>A1<｜end▁of▁sentence｜><｜User｜>U2<｜Assistant｜>",
    "deepseekr1": "<B>S<｜User｜>U1<｜Assistant｜>A1<｜end▁of▁sentence｜><｜User｜>U2<｜Assistant｜><think>\n",
    "default": "System: S<E>\nHuman: U1<E>\nAssistant:A1<E>\nHuman: U2<E>\nAssistant:",
    "empty": "SU1A1<E>U2",
    "gemma": "<B><start_of_turn>user\nS\n\nU1<end_of_turn>\n<start_of_turn>model\nA1<end_of_turn>\n"
             "<start_of_turn>user\nU2<end_of_turn>\n<start_of_turn>model\n",
    "glm4": "[gMASK]<sop><|system|>\nS<|user|>\nU1<|assistant|>\nA1<|user|>\nU2<|assistant|>\n",
    "granite3": by_roles("granite3"),
    "internlm2": by_roles("chatml", "<B>"),
    "llama2": "<B>[INST] <<SYS>>\nS\n<</SYS>>\n\nU1 [/INST] A1 <E><B>[INST] U2 [/INST]",
    "llama3": by_roles("llama3", "<B>"),
    "mistral": "<B>[INST] S\n\nU1[/INST] A1<E>[INST] U2[/INST]",
    "olmo": "<|system|>\nS\n<|user|>\nU1\n<|assistant|>\nA1<E>\n<|user|>\nU2\n<|assistant|>\n",
    "phi3": by_roles("phi3"),
    "phi4": by_roles("phi4"),
    "phi4_mini": by_roles("phi4_mini"),
    "qwen": by_roles("chatml"),
    "qwen3": by_roles("chatml"),
    "smollm2": by_roles("chatml"),
    "vicuna": "S USER: U1 ASSISTANT: A1<E>USER: U2 ASSISTANT:",
    "zephyr": by_roles("zephyr"),
}  # fmt: skip


def tokenizer_with(name: str | None = None) -> Any:
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"bos_token": "<B>", "eos_token": "<E>"})
    return apply_template(tokenizer, name)


@pytest.mark.parametrize("name", sorted(GOLDEN))
def test_golden_text(name: str) -> None:
    messages = [{"role": role, "content": text} for role, text in TALK]
    tokenizer = tokenizer_with(name)
    assert tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == GOLDEN[name]


def test_every_file_has_a_name_and_a_golden_text() -> None:
    files = {path.stem for path in FOLDER.glob("*.jinja")}
    assert {template.file for template in TEMPLATES.values()} == files == set(GOLDEN)
    assert len(TEMPLATES) >= 15


def test_system_messages_that_are_always_there() -> None:
    for name, system in (("qwen", "You are Qwen"), ("smollm2", "named SmolLM"), ("alpaca", "Below is an instruction")):
        text = tokenizer_with(name).apply_chat_template([{"role": "user", "content": "q"}], tokenize=False)
        assert system in text
    text = tokenizer_with("qwen3").apply_chat_template([{"role": "user", "content": "q"}], tokenize=False)
    assert text == "<|im_start|>user\nq<|im_end|>\n"


@pytest.mark.parametrize("name", sorted(TEMPLATES))
def test_every_answer_is_learned_to_its_end_and_generation_stops_there(name: str) -> None:
    tokenizer = tokenizer_with(name)
    tokenizer.add_special_tokens({"additional_special_tokens": list(TEMPLATES[name].stop)})
    messages = [Message("user", "U1"), Message("assistant", "A1"), Message("user", "U2"), Message("assistant", "A2")]
    learned = [
        rendering.text[begin:end]
        for rendering in ChatRenderer(tokenizer).render(Conversation(messages))
        for begin, end, wanted in rendering.spans
        if wanted
    ]
    assert len(learned) == 2
    stops = [tokenizer.decode([i]) for i in stop_token_ids(tokenizer)]
    for answer, text in zip(("A1", "A2"), learned, strict=True):
        assert answer in text
        assert text.endswith(tuple(stops)), f"{text!r} does not end with one of {stops}"
        assert sum(text.count(stop) for stop in stops) == 1


@pytest.mark.parametrize("name", ["chatml", "llama3", "mistral", "qwen", "qwen3"])
def test_tools_calls_and_results_are_shown(name: str) -> None:
    call = {"type": "function", "function": {"name": "weather", "arguments": {"city": "奥斯陆"}}}
    tool = {"type": "function", "function": {"name": "weather", "description": "d", "parameters": {"type": "object"}}}
    messages = [
        Message("system", "S"), Message("user", "U"), Message("assistant", "", [call]), Message("tool", '{"t": "雨"}'),
        Message("assistant", "A"),
    ]  # fmt: skip
    renderings = ChatRenderer(tokenizer_with(name)).render(Conversation(messages, [tool]))
    text = renderings[-1].text
    assert json.dumps({"city": "奥斯陆"}, ensure_ascii=False) in text
    learned = "".join(r.text[a:b] for r in renderings for a, b, wanted in r.spans if wanted)
    assert "奥斯陆" in learned
    assert "雨" in text
    assert "雨" not in learned


def test_unknown_names_get_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'qwen3'"):
        template_text("qwen33")
    with pytest.raises(ConfigError, match="known: alpaca"):
        template_text("zzz")


def test_a_tokenizer_without_what_the_template_writes() -> None:
    forget_notes()
    apply_template(tiny_tokenizer(), "phi3")
    assert any("<|end|>" in line for line in notes())
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = None
    with pytest.raises(ConfigError, match="writes the eos token and this tokenizer has none"):
        apply_template(tokenizer, "default")
    with pytest.raises(ConfigError, match="writes the bos token"):
        apply_template(tiny_tokenizer(), "gemma")
