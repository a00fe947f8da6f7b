"""A Modelfile for Ollama beside the GGUF: where the weights are, how a chat is written, where an answer ends.

Ollama renders chats with Go templates and cannot run the Jinja template of the GGUF file, so a template is only written
where it is one of the well-known forms, and only after the form was checked: the form and the Jinja template must
render the same text for short and longer conversations; a system message that the template adds by itself becomes
SYSTEM.  Otherwise the Modelfile says that it has none.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

_FORMS: dict[str, tuple[str, str, str, str, str]] = {
    # name: before everything, system turn, user turn, assistant's opening, assistant's end
    "chatml": (
        "", "<|im_start|>system\n{}<|im_end|>\n", "<|im_start|>user\n{}<|im_end|>\n", "<|im_start|>assistant\n",
        "<|im_end|>\n",
    ),
    "llama3": (
        "", "<|start_header_id|>system<|end_header_id|>\n\n{}<|eot_id|>",
        "<|start_header_id|>user<|end_header_id|>\n\n{}<|eot_id|>",
        "<|start_header_id|>assistant<|end_header_id|>\n\n", "<|eot_id|>",
    ),
    "phi3": ("", "<|system|>\n{}<|end|>\n", "<|user|>\n{}<|end|>\n", "<|assistant|>\n", "<|end|>\n"),
    "zephyr": ("", "<|system|>\n{}</s>\n", "<|user|>\n{}</s>\n", "<|assistant|>\n", "</s>\n"),
    "gemma": (
        "", "", "<start_of_turn>user\n{}<end_of_turn>\n", "<start_of_turn>model\n", "<end_of_turn>\n",
    ),
    "mistral": ("", "", "[INST] {} [/INST]", "", "</s>"),
}  # fmt: skip


def form_of(tokenizer: Any) -> str | None:
    """The name of the form that renders what the tokenizer's template renders; None where none does."""
    for name, form in _FORMS.items():
        if all(_same(tokenizer, form, chat) for chat in _chats(bool(form[1]))):
            return name
    return None


def default_system(tokenizer: Any, name: str) -> str | None:
    """The system message that the template writes by itself where a chat has none: "" for none, None if unclear."""
    form = _FORMS[name]
    chat = [{"role": "user", "content": "Hello"}]
    text = str(tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True))
    rest = _render(form, chat)
    before, _, after = form[1].partition("{}")
    if not text.startswith((before or rest, rest)):  # bos may be the form's own first token
        text = text.removeprefix(tokenizer.bos_token or "")
    if text == rest:
        return ""
    if form[1] and text.endswith(rest) and text.startswith(before):
        turn = text.removesuffix(rest)
        if turn.endswith(after):
            return turn.removeprefix(before).removesuffix(after)
    return None


def _chats(system: bool) -> list[list[dict[str, str]]]:
    turns = [{"role": "user", "content": "Hello 世界"}, {"role": "assistant", "content": "Hi."}]
    more = [*turns, {"role": "user", "content": "And now?"}]
    first = {"role": "system", "content": "Be brief."}
    return [[first, turns[0]], [first, *more]] if system else [turns[:1], more]


def _same(tokenizer: Any, form: tuple[str, str, str, str, str], chat: list[dict[str, str]]) -> bool:
    try:
        text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    except Exception:  # a template may refuse a role
        return False
    bos = tokenizer.bos_token or ""
    return str(text).removeprefix(bos) == _render(form, chat).removeprefix(bos)


def _render(form: tuple[str, str, str, str, str], chat: list[dict[str, str]]) -> str:
    before, system, user, opening, end = form
    parts = [before]
    for message in chat:
        content = message["content"]
        if message["role"] == "assistant":
            parts.append(opening + content + end)
        else:
            parts.append((system if message["role"] == "system" else user).format(content))
    return "".join([*parts, opening])


def modelfile(gguf_name: str, tokenizer: Any, license_name: str | None) -> tuple[str, str | None]:
    """The file's text, and the name of the form (None: no template could be expressed)."""
    lines = [f"FROM ./{gguf_name}"]
    form = form_of(tokenizer) if tokenizer.chat_template else None
    system_text = default_system(tokenizer, form) if form else None
    if system_text is None:
        form = None
    if form is not None:
        _, system, user, opening, end = _FORMS[form]
        parts = ["{{ if .System }}" + system.format("{{ .System }}") + "{{ end }}"] if system else []
        parts += ["{{ if .Prompt }}" + user.format("{{ .Prompt }}") + "{{ end }}" + opening + "{{ .Response }}" + end]
        lines.append('TEMPLATE """' + "".join(parts) + '"""')
        if system_text:
            lines.append(f'SYSTEM """{system_text}"""')
        lines.append(f'PARAMETER stop "{end.strip()}"')
    elif tokenizer.chat_template:
        lines.append("# The chat template is not one that Ollama's language is known to express; add TEMPLATE by hand.")
    else:
        lines.append("# The model has no chat template: it continues text.")
    if license_name:
        lines.append(f'LICENSE """{license_name}"""')
    return "\n".join(lines) + "\n", form


def write_modelfile(folder: Path, gguf_name: str, tokenizer: Any, license_name: str | None) -> str | None:
    """Write `Modelfile` into the folder; returns the form's name."""
    text, form = modelfile(gguf_name, tokenizer, license_name)
    (folder / "Modelfile").write_text(text, encoding="utf-8")
    return form
