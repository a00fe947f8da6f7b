"""`lumen chat`: talk to a model; the answer appears as it is generated."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

USAGE = """usage: lumen chat MODEL|FILE.yaml [--adapter DIR] [--prompt TEXT ...] [key=value ...]

Talk to a model. MODEL is a directory, a hub id, a .gguf file, or an adapter's folder; FILE.yaml is a configuration
(LLaMA-Factory's inference files are accepted). Text piped in is answered line by line.

  --adapter DIR        an adapter on top of the model (adapter_name_or_path)
  --prompt TEXT        answer TEXT and end; again for further turns of the same conversation
  --system TEXT        system message
  --greedy             always the likeliest token
  --allow-remote-code  run code that the model ships
  key=value            any key: temperature=0.7 top_p=0.9 max_new_tokens=200 template=qwen3 infer_dtype=float32

In the conversation: /clear forgets it, /system TEXT sets the system message and forgets it, /help, /exit. A line that
ends in \\ is continued on the next. Ctrl-C stops an answer.
"""

HELP = "/clear forgets the conversation, /system TEXT sets the system message, /exit ends; Ctrl-C stops an answer"


def main(argv: list[str]) -> int:
    from lumen.cli.arguments import load_for_answers, split_for_answers, take

    prompts, rest = take(argv, "--prompt")
    arguments = split_for_answers(rest)
    if arguments.help or not argv:
        print(USAGE, end="", file=sys.stdout if arguments.help else sys.stderr)
        return 0 if arguments.help else 2
    loaded = load_for_answers(arguments, fix="lumen chat MODEL, or --adapter DIR")
    from lumen.generate.chat import Chat
    from lumen.generate.open import open_model

    interactive = not prompts and sys.stdin.isatty()
    chat = Chat(open_model(loaded.run), loaded.run, fixed_seed=not interactive or "seed" in loaded.given)
    if prompts:
        for prompt in prompts:
            _answer(chat, prompt)
        return 0
    if interactive:
        print(f"({HELP})", file=sys.stderr)
    for line in _lines(interactive):
        if not _command(chat, line):
            break
    return 0


def _lines(interactive: bool) -> Iterator[str]:
    """Lines of standard input, joined where they end in a backslash."""
    parts: list[str] = []
    while True:
        try:
            line = input("... " if interactive and parts else "> " if interactive else "")
        except EOFError:
            if interactive:
                print()
            if parts:
                yield "\n".join(parts)
            return
        if line.endswith("\\"):
            parts.append(line[:-1])
            continue
        text = "\n".join([*parts, line])
        parts = []
        if text.strip():
            yield text


def _command(chat: Any, line: str) -> bool:
    """Act on a line; False ends the conversation."""
    word, _, rest = line.strip().partition(" ")
    if word in ("/exit", "/quit"):
        return False
    if word == "/clear":
        chat.clear()
        print("(forgotten)", file=sys.stderr)
    elif word == "/system":
        chat.set_system(rest.strip())
        print(f"(system message {'set' if rest.strip() else 'removed'}; forgotten)", file=sys.stderr)
    elif word == "/help":
        print(f"({HELP})", file=sys.stderr)
    elif word.startswith("/") and word[1:].isalpha() and len(word) < 12:
        print(f"(no command {word}; {HELP})", file=sys.stderr)
    else:
        _answer(chat, line)
    return True


def _answer(chat: Any, text: str) -> None:
    try:
        chat.ask(text, lambda piece: print(piece, end="", flush=True))
    except KeyboardInterrupt:
        print(" (stopped)", end="", file=sys.stderr)
    print(flush=True)
