"""Which tokens of a conversation are learned, checked against transformers' own masks and against what chat sends."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.helpers import shared_data, smollm2_gguf, tiny_tokenizer

from lumen.core import DataError
from lumen.data.build import build_datasets
from lumen.data.config import DataConfig
from lumen.data.conversation import Conversation, Message, NothingToLearn, RowError
from lumen.data.examples import IGNORE
from lumen.data.render import ChatRenderer, _in_parts, encode_renderings, prompt_ids
from lumen.data.rows import to_conversation
from lumen.data.templates import apply_template, stop_token_ids

CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}
TOOL = {"type": "function", "function": {"name": "weather", "description": "Weather", "parameters": {"type": "object"}}}
WITH_BLOCKS = (
    "{%- for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{%- if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{%- else %}{{ message['content'] + '<|im_end|>' }}{%- endif %}{{ '\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{%- endif %}"
)


def talk(rng: random.Random) -> list[Message]:
    words = ["hi", " hello there", "\n\nnew", "好的", "🙂 ok", "trailing ", "a\n", "<b>", "1,2"]
    messages = [Message("system", "Be kind")] if rng.random() < 0.5 else []
    for _ in range(rng.randrange(1, 4)):
        messages += [Message("user", rng.choice(words)), Message("assistant", rng.choice(words))]
    return messages


def spans(renderer: ChatRenderer, *messages: Message, tools: Any = None) -> list[list[str]]:
    renderings = renderer.render(Conversation(list(messages), tools))
    return [[r.text[a:b] for a, b, wanted in r.spans if wanted] for r in renderings]


@pytest.mark.parametrize("seed", range(20))
def test_masks_equal_those_of_transformers_for_the_same_template(seed: int) -> None:
    """The oracle marks what stands in {% generation %}; we find the same in a template without such blocks."""
    messages = talk(random.Random(seed))
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = WITH_BLOCKS
    expected = tokenizer.apply_chat_template(
        [m.as_dict() for m in messages], return_dict=True, return_assistant_tokens_mask=True
    )
    for template in (WITH_BLOCKS, WITH_BLOCKS.replace("{% generation %}", "").replace("{% endgeneration %}", "")):
        tokenizer.chat_template = template
        renderer = ChatRenderer(tokenizer)
        assert renderer.has_generation == ("generation %" in template.replace("add_generation_prompt %", ""))
        ((ids, learned),) = encode_renderings(tokenizer, renderer.render(Conversation(messages)))
        assert ids.tolist() == list(expected["input_ids"])
        assert learned.astype(int).tolist() == expected["assistant_masks"]


@pytest.mark.parametrize("seed", range(10))
def test_every_learned_answer_follows_exactly_the_prompt_that_chat_sends(seed: int) -> None:
    messages = talk(random.Random(seed))
    tokenizer = tiny_tokenizer()
    ((ids, learned),) = encode_renderings(tokenizer, ChatRenderer(tokenizer).render(Conversation(messages)))
    begins = np.flatnonzero(np.diff(np.concatenate([[0], learned.astype(int)])) == 1)
    turns = [i for i, m in enumerate(messages) if m.role == "assistant"]
    assert len(begins) == len(turns)
    for begin, turn in zip(begins, turns, strict=True):
        assert prompt_ids(tokenizer, [m.as_dict() for m in messages[:turn]]) == ids[:begin].tolist()


def test_qwen3_turns_are_learned_as_the_model_generates_them() -> None:
    """Qwen3 leaves earlier reasoning out of history, so each question is learned in a rendering that ends with it."""
    tokenizer = apply_template(tiny_tokenizer(), "qwen3")
    messages = [
        Message("user", "q1"), Message("assistant", "a1", reasoning_content="t1"),
        Message("user", "q2"), Message("assistant", "", [CALL], "t2"), Message("tool", "rain"),
        Message("assistant", "a2", reasoning_content="t3"),
    ]  # fmt: skip
    end, call = "<|im_end|>", '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
    assert spans(ChatRenderer(tokenizer), *messages, tools=[TOOL]) == [
        [f"<think>\nt1\n</think>\n\na1{end}"],
        [f"<think>\nt2\n</think>\n\n{call}{end}", f"<think>\nt3\n</think>\n\na2{end}"],
    ]
    without = spans(ChatRenderer(tokenizer, enable_thinking=False), *messages, tools=[TOOL])
    assert [text for turn in without for text in turn] == [f"a1{end}", f"{call}{end}", f"a2{end}"]
    assert spans(ChatRenderer(tokenizer, mask_history=True), *messages, tools=[TOOL]) == [
        [f"<think>\nt3\n</think>\n\na2{end}"]
    ]


def test_a_row_that_needs_two_renderings_counts_once_and_stays_on_one_side_of_the_split(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LUMEN_CACHE", str(tmp_path / "cache"))
    rows = [{"instruction": f"q{n}", "output": "<think>\nb\n</think>\n\na", "history": [["h", "i"]]} for n in range(10)]
    path = tmp_path / "rows.json"
    path.write_text(json.dumps(rows), "utf-8")  # all on one line
    data = build_datasets(DataConfig(dataset=str(path), template="qwen3", val_size=3), tiny_tokenizer(), seed=0)
    (report,) = data.report.datasets
    assert (report.rows, report.kept, report.examples) == (10, 10, 20)
    sides = [{example.source for example in store} for store in (data.train, data.eval["eval"])]
    assert list(map(len, sides)) == [7, 3]
    assert not sides[0] & sides[1]


def test_observations_system_and_user_are_never_learned() -> None:
    tokenizer = tiny_tokenizer()
    messages = [
        Message("system", "SYS"), Message("user", "USR"), Message("assistant", "", [CALL]), Message("tool", "OBS"),
        Message("assistant", "done"),
    ]  # fmt: skip
    (turns,) = spans(ChatRenderer(tokenizer), *messages, tools=[TOOL])
    assert turns[1] == "done<|im_end|>"
    assert "weather" in turns[0]
    assert not any(text in turn for turn in turns for text in ("SYS", "USR", "OBS"))


def test_weight_zero_mask_history_and_empty_turns_are_not_learned() -> None:
    tokenizer = tiny_tokenizer()
    messages = [
        Message("user", "1"), Message("assistant", "one", train=False), Message("user", "2"), Message("assistant", " "),
        Message("user", "3"), Message("assistant", "three"),
    ]  # fmt: skip
    assert spans(ChatRenderer(tokenizer), *messages) == [["three<|im_end|>"]]
    with pytest.raises(NothingToLearn):
        spans(ChatRenderer(tokenizer, mask_history=True), *messages[:4])


def test_a_token_that_reaches_over_the_beginning_of_an_answer_is_split_there() -> None:
    """`Assistant:` + ` hello` could become one token across the edge; in chat the prompt's tokens end at the edge."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ ('Q: ' if m.role == 'user' else 'hello, how are y') + m.content }}{{ '\\n' }}"
        "{% endfor %}"
        "{% if add_generation_prompt %}hello, how are y{% endif %}"
    )
    whole = tokenizer("hello, how are you")["input_ids"]
    assert len(whole) < len(tokenizer("hello, how are y")["input_ids"]) + len(tokenizer("ou")["input_ids"])
    messages = [Message("user", "?"), Message("assistant", "ou today")]
    ((ids, learned),) = encode_renderings(tokenizer, ChatRenderer(tokenizer).render(Conversation(messages)))
    assert ids[~learned].tolist() == prompt_ids(tokenizer, [{"role": "user", "content": "?"}])
    assert tokenizer.decode(ids[learned]) == "ou today\n<|im_end|>"  # closed, because the template does not


def test_tokenising_in_parts_agrees_with_offsets_where_nothing_reaches_over() -> None:
    tokenizer = tiny_tokenizer()
    for seed in range(10):
        (rendering,) = ChatRenderer(tokenizer).render(Conversation(talk(random.Random(seed))))
        ((ids, learned),) = encode_renderings(tokenizer, [rendering])
        parts = _in_parts(tokenizer, rendering)
        assert tokenizer.decode(parts[0][parts[1]]) == tokenizer.decode(ids[learned])
        assert tokenizer.decode(parts[0]) == tokenizer.decode(ids)


def test_what_the_template_would_lose_is_an_error() -> None:
    tokenizer = tiny_tokenizer()
    with pytest.raises(RowError, match="does not show the reasoning"):
        spans(ChatRenderer(tokenizer), Message("user", "q"), Message("assistant", "a", reasoning_content="because"))
    tokenizer.chat_template = "{% for m in messages %}{{ '<|im_start|>' + m.content }}{% endfor %}"
    for messages, tools, lost in (
        ([Message("user", "q"), Message("assistant", "", [CALL])], None, "tool calls"),
        ([Message("user", "q"), Message("assistant", "a")], [TOOL], "tool 'weather'"),
    ):
        with pytest.raises(RowError, match=lost):
            spans(ChatRenderer(tokenizer), *messages, tools=tools)
    tokenizer.chat_template = (
        "{% for m in messages if m.role != 'system' %}{{ '<|im_start|>' + m.role + m.content }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant' }}{% endif %}"
    )
    with pytest.raises(RowError, match="does not show the text of a system turn"):
        spans(ChatRenderer(tokenizer), Message("system", "SYS"), Message("user", "q"), Message("assistant", "a"))


def test_a_template_that_refuses_a_row_names_the_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LUMEN_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "rows.jsonl"
    rows = [{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}]
    rows.append({"messages": [{"role": "system", "content": "s"}, *rows[0]["messages"]]})
    path.write_text("\n".join(map(json.dumps, rows)), "utf-8")
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
        + (tokenizer.chat_template)
    )
    with pytest.raises(DataError, match="no system role") as caught:
        build_datasets(DataConfig(dataset=str(path)), tokenizer, seed=0)
    assert caught.value.where == f"{path}:2"
    data = build_datasets(DataConfig(dataset=str(path), on_bad_rows="skip"), tokenizer, seed=0)
    assert len(data.report.rejected) == 1


def test_no_template_at_all_is_an_error_that_names_one() -> None:
    with pytest.raises(DataError, match="no chat template") as caught:
        ChatRenderer(tiny_tokenizer(template=False))
    assert "template: chatml" in caught.value.fix


def test_default_system_is_for_rows_without_one() -> None:
    renderer = ChatRenderer(tiny_tokenizer(), default_system="DEFAULT")
    turns = [Message("user", "q"), Message("assistant", "a")]
    assert "DEFAULT" in renderer.render(Conversation(turns))[0].text
    assert "DEFAULT" not in renderer.render(Conversation([Message("system", "own"), *turns]))[0].text


@pytest.fixture(scope="module")
def smollm2() -> Any:
    from transformers import AutoTokenizer

    file = smollm2_gguf()
    return AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)


def test_real_rows_through_smollm2_are_what_transformers_makes_of_them(
    smollm2: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LUMEN_CACHE", str(tmp_path / "cache"))
    for name in ("alpaca_en_demo.json", "alpaca_zh_demo.json"):
        file = shared_data(name)
        rows = json.loads(file.read_text("utf-8"))[:150]
        data = build_datasets(DataConfig(dataset=str(file), max_samples=150, cutoff_len=4096), smollm2, seed=0)
        assert len(data.train) == 150
        for row, example in zip(rows, data.train, strict=True):
            user = "\n".join(part for part in (row["instruction"], row["input"]) if part)
            turns = [{"role": "user", "content": user}, {"role": "assistant", "content": row["output"]}]
            whole = smollm2.apply_chat_template(turns)["input_ids"]
            prompt = smollm2.apply_chat_template(turns[:1], add_generation_prompt=True)["input_ids"]
            assert example.input_ids.tolist() == list(whole)
            first = int(np.argmax(example.labels != IGNORE))
            assert example.input_ids[:first].tolist() == list(prompt)
            answer = smollm2.decode(example.input_ids[example.labels != IGNORE])
            assert answer == row["output"] + "<|im_end|>"
    assert stop_token_ids(smollm2) == [smollm2.convert_tokens_to_ids("<|im_end|>")]


def test_named_template_smollm2_gives_the_ids_of_its_own(smollm2: Any) -> None:
    import copy

    named = apply_template(copy.deepcopy(smollm2), "smollm2")
    for seed in range(10):
        messages = [m.as_dict() for m in talk(random.Random(seed))]
        for prompt in (True, False):
            own = smollm2.apply_chat_template(messages[:-1] if prompt else messages, add_generation_prompt=prompt)
            ours = named.apply_chat_template(messages[:-1] if prompt else messages, add_generation_prompt=prompt)
            assert own["input_ids"] == ours["input_ids"]


def test_train_on_prompt_learns_everything_but_the_first_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LUMEN_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([{"instruction": "q", "output": "a"}]), "utf-8")
    (example,) = build_datasets(DataConfig(dataset=str(path), train_on_prompt=True), tiny_tokenizer(), seed=0).train
    assert example.labels[0] == IGNORE
    assert (example.labels[1:] == example.input_ids[1:]).all()


def test_openai_null_content_with_tool_calls_renders_the_call() -> None:
    from lumen.data.info import DatasetSpec

    row = {
        "messages": [
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": None, "tool_calls": [{"id": "x", "function": {
                "name": "weather", "arguments": '{"city": "Oslo"}'}}]},
            {"role": "tool", "tool_call_id": "x", "content": "rain"},
            {"role": "assistant", "content": "It rains."},
        ],
        "tools": json.dumps([TOOL["function"]]),
    }  # fmt: skip
    conversation = to_conversation(row, DatasetSpec("rows").told_by(row))
    renderer = ChatRenderer(apply_template(tiny_tokenizer(), "chatml"))
    (rendering,) = renderer.render(conversation)
    first = rendering.text[slice(*rendering.spans[0][:2])]
    assert first == '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call><|im_end|>'
    assert json.dumps(TOOL) in rendering.text
    assert "None" not in rendering.text
