"""Row formats: what each becomes, and what each mistake is called."""

from __future__ import annotations

from typing import Any

import pytest

from lumen.core import DataError
from lumen.data.conversation import Conversation, NothingToLearn, RowError
from lumen.data.info import ALPACA_COLUMNS, OPENAI_COLUMNS, OPENAI_TAGS, SHAREGPT_COLUMNS, SHAREGPT_TAGS, DatasetSpec
from lumen.data.rows import text_of, to_conversation

ALPACA = DatasetSpec("rows", formatting="alpaca", columns=dict(ALPACA_COLUMNS))
SHAREGPT = DatasetSpec("rows", formatting="sharegpt", columns=dict(SHAREGPT_COLUMNS), tags=dict(SHAREGPT_TAGS))
OPENAI = DatasetSpec("rows", formatting="openai", columns=dict(OPENAI_COLUMNS), tags=dict(OPENAI_TAGS))


def turns(conversation: Conversation) -> list[tuple[str, str]]:
    return [(message.role, message.content) for message in conversation.messages]


def say(*pairs: tuple[str, Any]) -> dict[str, Any]:
    return {"conversations": [{"from": role, "value": value} for role, value in pairs]}


def chat(*pairs: tuple[str, Any], **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content} for role, content in pairs], **more}


def test_alpaca_joins_instruction_and_input_and_puts_history_before() -> None:
    row = {"instruction": "I", "input": "in", "output": "O", "system": "S", "history": [["a", "b"], ["c", "d"]]}
    assert turns(to_conversation(row, ALPACA)) == [
        ("system", "S"), ("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d"), ("user", "I\nin"),
        ("assistant", "O"),
    ]  # fmt: skip
    assert turns(to_conversation({"instruction": "I", "input": "", "output": "O"}, ALPACA))[0] == ("user", "I")
    assert turns(to_conversation({"input": "in", "output": "O", "history": None}, ALPACA))[0] == ("user", "in")


def test_columns_that_are_not_listed_are_not_there() -> None:
    spec = DatasetSpec("rows", formatting="alpaca", columns={"prompt": "q", "response": "a"})
    row = {"q": "Q", "a": "A", "input": "no", "system": "no", "history": "no"}
    assert turns(to_conversation(row, spec)) == [("user", "Q"), ("assistant", "A")]


def test_sharegpt_roles_calls_and_tools() -> None:
    row = say(("system", "S"), ("human", "q"), ("function_call", '{"name": "f", "arguments": {"x": 1}}'),
              ("observation", "r"), ("gpt", "a"))  # fmt: skip
    row["tools"] = '[{"name": "f", "description": "d", "parameters": {}}]'
    conversation = to_conversation(row, SHAREGPT)
    assert [role for role, _ in turns(conversation)] == ["system", "user", "assistant", "tool", "assistant"]
    assert conversation.messages[2].tool_calls == [
        {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    ]
    assert conversation.tools == [{"type": "function", "function": {"name": "f", "description": "d", "parameters": {}}}]


def test_own_tags_of_dataset_info() -> None:
    tags = {**SHAREGPT_TAGS, "role_tag": "role", "content_tag": "text", "user_tag": "U", "assistant_tag": "A"}
    spec = DatasetSpec("rows", formatting="sharegpt", columns={"messages": "talk"}, tags=tags)
    row = {"talk": [{"role": "U", "text": "q"}, {"role": "A", "text": "a"}]}
    assert turns(to_conversation(row, spec)) == [("user", "q"), ("assistant", "a")]


@pytest.mark.parametrize(
    ("spec", "row", "message"),
    [
        (SHAREGPT, say(("gpt", "a"), ("human", "q")), "[0]: roles out of order: the assistant speaks first"),
        (SHAREGPT, say(("human", "q"), ("human", "q"), ("gpt", "a")), "[1]: roles out of order: user after user"),
        (SHAREGPT, say(("human", "q"), ("gpt", "a"), ("gpt", "b")), "[2]: roles out of order: assistant after"),
        (SHAREGPT, say(("human", "q"), ("gpt", "a"), ("system", "s")), "[2]: a system message can only be the first"),
        (SHAREGPT, say(("human", "q"), ("bot", "a")), "conversations[1].from: role 'bot' is unknown"),
        (SHAREGPT, say(("human", "q"), ("function_call", "f(x)"), ("observation", "r"), ("gpt", "a")), "expected JSON"),
        (SHAREGPT, say(("human", 3), ("gpt", "a")), "conversations[0].value: expected text, got a number"),
        (SHAREGPT, {"conversations": "hello"}, "expected JSON"),
        (SHAREGPT, {"conversations": {"from": "human"}}, "conversations: expected a list of messages, got an object"),
        (SHAREGPT, {"conversations": ["hi"]}, "conversations[0]: expected a message object, got text"),
        (OPENAI, chat(("user", "q"), ("assistant", "a"), ("tool", "r")), "roles out of order: a tool result without"),
        (OPENAI, chat(("user", None), ("assistant", "a")), "messages[0].content: expected text, got null"),
        (OPENAI, {"messages": [{"content": "q"}]}, "messages[0]: no 'role' in this message"),
        (OPENAI, chat(("user", [{"type": "image_url"}]), ("assistant", "a")), "only text parts can be trained on"),
        (OPENAI, chat(("user", "q"), ("assistant", "a"), tools="[{]"), "tools: expected JSON"),
        (OPENAI, chat(("user", "q"), ("assistant", "a"), tools=[{"nom": "f"}]), "tools[0]: expected a tool with"),
        (ALPACA, {"instruction": "q", "output": "a", "history": [["x"]]}, "history[0]: expected a pair of texts"),
        (ALPACA, {"instruction": "q", "output": "a", "history": 5}, "history: expected a list of pairs, got a number"),
        (ALPACA, {"instruction": {"a": 1}, "output": "a"}, "instruction: expected text, got an object"),
        (ALPACA, {"instruction": "q", "output": "\ud800"}, "output: half of a surrogate pair"),
        (ALPACA, "text", "expected an object, got text"),
    ],
)  # fmt: skip
def test_mistakes_name_field_and_reason(spec: DatasetSpec, row: Any, message: str) -> None:
    with pytest.raises(RowError) as caught:
        to_conversation(row, spec)
    assert message in caught.value.what


@pytest.mark.parametrize(
    ("spec", "row", "reason"),
    [
        (SHAREGPT, {"conversations": []}, "conversations is empty"),
        (SHAREGPT, {"conversations": None}, "conversations is missing or null"),
        (SHAREGPT, say(("human", "q")), "no assistant turn"),
        (SHAREGPT, say(("human", "q"), ("gpt", " ")), "every assistant turn is empty"),
        (OPENAI, {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", "weight": 0}]},
         "every assistant turn has weight 0"),
        (ALPACA, {"instruction": "", "input": None, "output": "a"}, "no prompt: instruction and input"),
    ],
)  # fmt: skip
def test_rows_with_nothing_to_learn_say_why(spec: DatasetSpec, row: Any, reason: str) -> None:
    with pytest.raises(NothingToLearn, match=reason.replace("(", r"\(")):
        to_conversation(row, spec)


def test_turns_after_the_last_answer_are_left_out_and_counted() -> None:
    conversation = to_conversation(say(("human", "q"), ("gpt", "a"), ("human", "and?")), SHAREGPT)
    assert turns(conversation) == [("user", "q"), ("assistant", "a")]
    assert conversation.unanswered == 1


def test_several_tool_results_may_follow_one_openai_message_with_several_calls() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    row = {
        "messages": [
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": None, "tool_calls": [call, call]},
            {"role": "tool", "content": "r1"}, {"role": "tool", "content": "r2"},
            {"role": "assistant", "content": [{"type": "text", "text": "a"}], "reasoning_content": "t"},
        ]
    }  # fmt: skip
    conversation = to_conversation(row, OPENAI)
    assert [role for role, _ in turns(conversation)] == ["user", "assistant", "tool", "tool", "assistant"]
    assert conversation.messages[-1].reasoning_content == "t"
    assert conversation.messages[-1].content == "a"


@pytest.mark.parametrize(
    ("row", "formatting"),
    [
        ({"instruction": "q", "output": "a"}, "alpaca"), ({"prompt": "q", "completion": "a"}, "alpaca"),
        ({"question": "q", "answer": "a"}, "alpaca"), (say(("human", "q"), ("gpt", "a")), "sharegpt"),
        (chat(("user", "q"), ("assistant", "a")), "openai"), ({"text": "t"}, "text"),
        ({"conversations": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}, "openai"),
    ],
)  # fmt: skip
def test_formats_are_told_from_the_first_row(row: dict[str, Any], formatting: str) -> None:
    spec = DatasetSpec("rows").told_by(row)
    assert spec.formatting == formatting
    if formatting == "text":
        assert text_of(row, spec) == "t"
        with pytest.raises(RowError, match="no turns"):
            to_conversation(row, spec)
    else:
        assert turns(to_conversation(row, spec)) == [("user", "q"), ("assistant", "a")]


def test_unknown_columns_say_what_would_be_understood() -> None:
    with pytest.raises(DataError, match="'antwort', 'frage'") as caught:
        DatasetSpec("rows").told_by({"frage": "q", "antwort": "a"})
    assert "dataset_info.json" in caught.value.fix


def test_preference_rows_are_recognised(tmp_path: Any) -> None:
    row = {
        **say(("human", "q")),
        "chosen": {"from": "gpt", "value": "good"},
        "rejected": {"from": "gpt", "value": "bad"},
    }
    spec = DatasetSpec("rows").told_by(row)
    assert spec.ranking
