"""Row formats → `Conversation`: alpaca, sharegpt, OpenAI messages; `text_of` for pretraining text.

A row that has a wrong type, a role out of order or a part this version cannot train on raises `RowError` with the
field; a row that is well formed but has nothing to learn raises `NothingToLearn` with the reason.  Nothing is dropped
or repaired in silence.
"""

from __future__ import annotations

import json
import re
from typing import Any

from lumen.data.conversation import Conversation, Message, NothingToLearn, RowError
from lumen.data.info import DatasetSpec, kind
from lumen.data.json_rows import parse_json


def to_conversation(row: Any, spec: DatasetSpec) -> Conversation:
    """The conversation of one row.  Raises RowError or NothingToLearn."""
    if not isinstance(row, dict):
        raise RowError(f"expected an object, got {kind(row)}")
    for media in ("images", "videos", "audios"):
        if media in spec.columns and row.get(spec.columns[media]):
            raise RowError("only text can be trained on", field=spec.columns[media])
    if spec.formatting == "alpaca":
        conversation = _alpaca(row, spec)
    elif spec.formatting in ("sharegpt", "openai"):
        conversation = _messages(row, spec)
    else:
        raise RowError("plain text has no turns", fix="use `stage: pt` for text, or rows with turns for `stage: sft`")
    if not any(message.role == "assistant" for message in conversation.messages):
        raise NothingToLearn("no assistant turn")
    return conversation


def text_of(row: Any, spec: DatasetSpec) -> str:
    """The text of one row for pretraining: its prompt column.  Raises RowError or NothingToLearn."""
    if not isinstance(row, dict):
        raise RowError(f"expected an object, got {kind(row)}")
    column = spec.columns.get("prompt")
    if column is None:
        raise RowError("this format has no text column for `stage: pt`", fix='map it: "columns": {"prompt": "text"}')
    text = _text(row, column, required=True)
    if not text.strip():
        raise NothingToLearn(f"{column} is empty")
    return text


def _text(row: dict[str, Any], column: str | None, *, required: bool = False) -> str:
    """A text column; "" where it is null or, unless required, missing."""
    if column is None:
        return ""
    if column not in row:
        if required:
            raise NothingToLearn(f"{column} is missing")
        return ""
    value = row[column]
    if value is None:
        return ""
    if not isinstance(value, str):
        raise RowError(f"expected text, got {kind(value)}", field=column)
    _encodable(value, column)
    return value


def _encodable(text: str, column: str) -> None:
    """JSON's \\ud800 escapes can make text that no encoding has."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RowError(f"half of a surrogate pair at character {error.start}, which is no text", field=column) from None


# --- alpaca ----------------------------------------------------------------------------------------------------------


def _alpaca(row: dict[str, Any], spec: DatasetSpec) -> Conversation:
    columns = spec.columns
    messages: list[Message] = []
    system = _text(row, columns.get("system"))
    if system:
        messages.append(Message("system", system))
    for number, pair in enumerate(_history(row, columns.get("history")), 1):
        field = f"{columns['history']}[{number - 1}]"
        if not (isinstance(pair, list | tuple) and len(pair) == 2 and all(isinstance(text, str) for text in pair)):
            raise RowError(f"expected a pair of texts, got {_shape(pair)}", field=field)
        for text in pair:
            _encodable(text, field)
        messages += [Message("user", pair[0]), Message("assistant", pair[1])]
    prompt = [_text(row, columns.get("prompt")), _text(row, columns.get("query"))]
    user = "\n".join(part for part in prompt if part)
    if "chosen" in columns and "rejected" in columns and spec.ranking:
        messages.append(Message("user", user))
        chosen, rejected = (Message("assistant", _text(row, columns[c], required=True)) for c in ("chosen", "rejected"))
        return Conversation(messages, _tools(row, columns.get("tools")), chosen, rejected)
    if "response" not in columns:
        raise RowError("this dataset maps no response column", fix='add "response" to its columns')
    answer = _text(row, columns["response"], required=True)
    if not answer.strip():
        raise NothingToLearn(f"{columns['response']} is {'null' if row[columns['response']] is None else 'empty'}")
    if not user:
        names = " and ".join(columns[name] for name in ("prompt", "query") if name in columns)
        raise NothingToLearn(f"no prompt: {names} missing or empty" if names else "no prompt column is mapped")
    messages += [Message("user", user), Message("assistant", answer)]
    return Conversation(messages, _tools(row, columns.get("tools")))


def _history(row: dict[str, Any], column: str | None) -> list[Any]:
    value = row.get(column) if column else None
    if isinstance(value, str) and value.strip():
        value = _json_text(value, column or "")
    if not value:
        return []
    if not isinstance(value, list):
        raise RowError(f"expected a list of pairs, got {kind(value)}", field=column or "")
    return value


def _shape(value: Any) -> str:
    return f"a list of {len(value)}" if isinstance(value, list) else kind(value)


# --- sharegpt and OpenAI messages ------------------------------------------------------------------------------------


def _messages(row: dict[str, Any], spec: DatasetSpec) -> Conversation:
    columns = spec.columns
    column = columns["messages"]
    turns = row.get(column)
    if isinstance(turns, str) and turns.strip():
        turns = _json_text(turns, column)
    if turns is None or turns == []:
        raise NothingToLearn(f"{column} is {'missing or null' if turns is None else 'empty'}")
    if not isinstance(turns, list):
        raise RowError(f"expected a list of messages, got {kind(turns)}", field=column)
    roles = {
        spec.tags["user_tag"]: "user", spec.tags["assistant_tag"]: "assistant", spec.tags["observation_tag"]: "tool",
        spec.tags["function_tag"]: "function", spec.tags["system_tag"]: "system",
    }  # fmt: skip
    if spec.formatting == "openai":
        roles |= {"user": "user", "assistant": "assistant", "tool": "tool", "system": "system", "developer": "system"}
    messages = [_message(turn, f"{column}[{n}]", spec, roles) for n, turn in enumerate(turns)]
    system = _text(row, columns.get("system"))
    if system and messages[0].role != "system":
        messages.insert(0, Message("system", system))
    _check_order(messages, column, strict=spec.formatting == "sharegpt", ranking=spec.ranking)
    tools = _tools(row, columns.get("tools"))
    if spec.ranking:
        pair = []
        for name in ("chosen", "rejected"):
            if name not in columns:
                raise RowError(f"ranking is true and no {name} column is mapped")
            answer = row.get(columns[name])
            pair.append(_message(answer, columns[name], spec, roles))
        return Conversation(messages, tools, pair[0], pair[1])
    said = len(messages)
    while messages and messages[-1].role != "assistant":
        messages.pop()
    answers = [m for m in messages if m.role == "assistant"]
    if not answers:
        raise NothingToLearn("no assistant turn")
    if all(m.empty for m in answers):
        raise NothingToLearn("every assistant turn is empty")
    if not any(m.train and not m.empty for m in answers):
        raise NothingToLearn("every assistant turn has weight 0")
    return Conversation(messages, tools, unanswered=said - len(messages))


def _message(turn: Any, field: str, spec: DatasetSpec, roles: dict[str, str]) -> Message:
    if not isinstance(turn, dict):
        raise RowError(f"expected a message object, got {kind(turn)}", field=field)
    role_tag, content_tag = spec.tags["role_tag"], spec.tags["content_tag"]
    if role_tag not in turn:
        raise RowError(f"no {role_tag!r} in this message", field=field)
    name = turn[role_tag]
    if not isinstance(name, str) or name not in roles:
        shown = repr(name) if isinstance(name, str) else kind(name)
        raise RowError(f"role {shown} is unknown", field=f"{field}.{role_tag}", fix="roles: " + ", ".join(roles))
    role = roles[name]
    calls = _tool_calls(turn.get("tool_calls"), f"{field}.tool_calls")
    content = _content(turn.get(content_tag), f"{field}.{content_tag}", optional=bool(calls) or role == "assistant")
    if role == "function":
        calls, content, role = _function_call(content, f"{field}.{content_tag}"), "", "assistant"
    elif calls and role != "assistant":
        raise RowError("only the assistant calls tools", field=f"{field}.tool_calls")
    reasoning = turn.get("reasoning_content", turn.get("reasoning"))
    if reasoning is not None and not isinstance(reasoning, str):
        raise RowError(f"expected text, got {kind(reasoning)}", field=f"{field}.reasoning_content")
    weight = turn.get("weight", 1)
    if weight not in (0, 1):
        raise RowError(f"weight must be 0 or 1, not {weight!r}", field=f"{field}.weight")
    extra = {key: turn[key] for key in ("name", "tool_call_id") if isinstance(turn.get(key), str)}
    return Message(role, content, calls, reasoning if role == "assistant" else None, bool(weight), extra)


def _content(value: Any, field: str, *, optional: bool) -> str:
    """Text, or OpenAI's list of text parts."""
    if isinstance(value, list):
        texts = []
        for n, part in enumerate(value):
            if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                what = part.get("type") if isinstance(part, dict) else kind(part)
                raise RowError(f"only text parts can be trained on, not {what}", field=f"{field}[{n}]")
            texts.append(part["text"])
        value = "".join(texts)
    if value is None:
        if optional:
            return ""
        raise RowError("expected text, got null", field=field)
    if not isinstance(value, str):
        raise RowError(f"expected text, got {kind(value)}", field=field)
    _encodable(value, field)
    return value


def _check_order(messages: list[Message], column: str, *, strict: bool, ranking: bool) -> None:
    """Roles must take turns: the user or a tool speaks, then the assistant.

    strict: sharegpt's rule, one and one.  Otherwise (OpenAI) several tool results may follow one call.
    """
    if any(m.role == "system" for m in messages[1:]):
        n = next(i for i, m in enumerate(messages) if i and m.role == "system")
        raise RowError("a system message can only be the first", field=f"{column}[{n}]")
    turns = messages[1:] if messages[0].role == "system" else messages
    first = len(messages) - len(turns)
    if not turns:
        raise NothingToLearn("no assistant turn")
    for n, (before, turn) in enumerate(zip([None, *turns], turns, strict=False)):
        expects_answer = before is not None and before.role != "assistant"
        place = f"{column}[{first + n}]"
        if turn.role == "assistant":
            if before is None:
                raise RowError("roles out of order: the assistant speaks first", field=place)
            if not expects_answer:
                raise RowError("roles out of order: assistant after assistant", field=place)
        elif expects_answer and before is not None:
            together = turn.role == "tool" and before.role == "tool" and not strict
            if not together:
                raise RowError(f"roles out of order: {turn.role} after {before.role}", field=place)
        if turn.role == "tool" and (before is None or (before.role == "assistant" and not before.tool_calls)):
            if not strict:
                raise RowError("roles out of order: a tool result without a call before it", field=place)
            if before is None:
                raise RowError("roles out of order: an observation comes first", field=place)
    if ranking and turns[-1].role == "assistant":
        raise RowError("a preference row must end with the user's turn", field=column)


# --- tools -----------------------------------------------------------------------------------------------------------


def _json_text(text: str, field: str) -> Any:
    try:
        return parse_json(text)
    except ValueError as error:
        raise RowError(f"expected JSON: {error}", field=field) from None


def _tools(row: dict[str, Any], column: str | None) -> list[dict[str, Any]] | None:
    """The tools column: a list, or its JSON as text; each as {"type": "function", "function": {…}}."""
    value = row.get(column) if column else None
    if isinstance(value, str):
        value = _json_text(value, column or "") if value.strip() else None
    if not value:
        return None
    if isinstance(value, dict):
        value = [value]
    if not isinstance(value, list):
        raise RowError(f"expected a list of tools, got {kind(value)}", field=column or "")
    tools = []
    for n, tool in enumerate(value):
        function = tool.get("function", tool) if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RowError("expected a tool with a name", field=f"{column}[{n}]")
        tools.append({"type": "function", "function": function})
    return tools


def _call(value: Any, field: str) -> dict[str, Any]:
    function = value.get("function", value) if isinstance(value, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
        raise RowError("expected a tool call with a function name", field=field)
    arguments = function.get("arguments", function.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = _json_text(arguments, f"{field}.arguments") if arguments.strip() else {}
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        raise RowError(f"expected an object, got {kind(arguments)}", field=f"{field}.arguments")
    call: dict[str, Any] = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
    if isinstance(value.get("id"), str):
        call["id"] = value["id"]
    return call


def _tool_calls(value: Any, field: str) -> list[dict[str, Any]] | None:
    """OpenAI's tool_calls; arguments may be JSON text, as the API returns them."""
    if isinstance(value, str):
        value = _json_text(value, field) if value.strip() else None
    if not value:
        return None
    if not isinstance(value, list):
        raise RowError(f"expected a list, got {kind(value)}", field=field)
    return [_call(call, f"{field}[{n}]") for n, call in enumerate(value)]


def _function_call(content: str, field: str) -> list[dict[str, Any]]:
    """sharegpt's function_call turn: its text is the JSON of one call or of a list."""
    value = _json_text(content, field)
    calls = value if isinstance(value, list) else [value]
    if not calls:
        raise RowError("no call in it", field=field)
    return [_call(call, f"{field}[{n}]" if isinstance(value, list) else field) for n, call in enumerate(calls)]


THINK = re.compile(r"^\s*<think>\n?(.*?)\n?</think>\s*", re.DOTALL)
"""Reasoning written inside an answer's text."""


def without_reasoning(messages: list[Message]) -> list[Message]:
    """Copies without any reasoning, for `enable_thinking: false`."""
    return [
        Message(m.role, THINK.sub("", m.content), m.tool_calls, None, m.train, m.extra) if m.role == "assistant" else m
        for m in messages
    ]


def dump_row(value: Any) -> str:
    """A row for the reject file, on one line; escaped where it holds what no encoding has."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return json.dumps(value, default=str)
    return text
