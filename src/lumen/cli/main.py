"""The `lumen` command: one table of verbs, each a module imported only when it is asked for.

`lumen --help` therefore imports neither torch nor anything that does.  A mistake of the user's is printed without a
traceback and exits with status 2; anything else that escapes is a bug of ours: traceback, one line that asks to report
it, status 1.  Ctrl-C exits with 130.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

VERBS = {
    "train": "train or fine-tune a model from a configuration file",
    "chat": "talk to a model, with or without an adapter",
    "generate": "answer the prompts of a file",
    "eval": "held-out loss, perplexity, generations before and after",
    "compare": "put runs side by side: method, memory, speed, held-out loss",
    "merge": "merge an adapter into its base, and verify the result",
    "export": "write a model in an engine's format, and verify it",
    "quantize": "quantise a model",
    "serve": "serve a model over an OpenAI-compatible API",
    "ui": "the web interface",
    "data": "inspect rows as the model sees them",
    "plan": "memory and time before a run",
    "doctor": "check this machine",
    "monitor": "watch a run",
    "hardware": "what this machine is",
    "kernels": "the table of kernels, and which would be chosen",
    "bench": "measure this machine",
    "config": "schema, keys and validation of configuration files",
    "init": "write a configuration file to start from",
}
"""Verb → one line. A verb is `lumen.cli.<verb>` with `main(argv) -> int`; one without a module is not built yet."""


def built_verbs() -> dict[str, str]:
    """The verbs whose module is there."""
    here = Path(__file__).parent
    return {verb: line for verb, line in VERBS.items() if (here / f"{verb}.py").exists() or (here / verb).is_dir()}


def usage() -> str:
    verbs = built_verbs()
    width = max(map(len, verbs), default=0)
    lines = [f"  {verb:<{width}}  {line}" for verb, line in verbs.items()]
    return "\n".join(
        [
            "Lumen trains large language models in low precision, AMD first.",
            "",
            "usage: lumen VERB [options]     `lumen VERB --help` explains a verb",
            "",
            *lines,
            "",
            "  --version  --help",
        ]
    )


def run(argv: Sequence[str]) -> int:
    """Run one command line and return its exit status."""
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(usage())
        return 0 if argv else 2
    if argv[0] in ("-V", "--version", "version"):
        print(f"lumen {import_module('lumen').__version__}")
        return 0
    verb, rest = argv[0], list(argv[1:])
    verbs = built_verbs()
    if verb not in verbs:
        import difflib

        close = difflib.get_close_matches(verb, verbs, n=1)
        hint = f"did you mean `lumen {close[0]}`?" if close else "`lumen --help` lists the verbs"
        print(f"there is no verb `{verb}`; {hint}", file=sys.stderr)
        return 2
    from lumen.core.errors import LumenError
    from lumen.core.log import quiet_bystanders

    quiet_bystanders()
    try:
        return import_module(f"lumen.cli.{verb}").main(rest) or 0
    except LumenError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        sys.stderr.close()  # the reader of our output (head, less) has left
        return 0
    except Exception:
        import traceback

        traceback.print_exc()
        print(
            f"this is a bug in Lumen; please report it with the lines above and the command `lumen {verb} ...`",
            file=sys.stderr,
        )
        return 1


def main() -> None:
    """Entry point of the console script."""
    sys.exit(run(sys.argv[1:]))
