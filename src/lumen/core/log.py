"""What Lumen says to the person at the terminal.

`say` prints one line; `note` prints a line once per process (a fallback, a no-op key, a choice made for the user);
`warn` marks a line as a warning.  All go to standard error, so standard output stays for results.  Notes are kept and
written into the run's report, because nothing may fall back silently.
"""

from __future__ import annotations

import logging

from rich.console import Console

logger = logging.getLogger("lumen")

console = Console(stderr=True, highlight=False, soft_wrap=True)

_noted: dict[str, None] = {}


def say(line: str) -> None:
    """Print one line."""
    console.print(line, markup=False)


def warn(line: str) -> None:
    """Print one line as a warning and keep it among the notes."""
    _noted.setdefault(line)
    console.print(f"[yellow]warning:[/yellow] {_escape(line)}")


def note(line: str) -> None:
    """Print a line the first time it is given in this process."""
    if line not in _noted:
        _noted[line] = None
        console.print(f"[dim]note:[/dim] {_escape(line)}")


def notes() -> list[str]:
    """Everything that was noted or warned about so far, in order."""
    return list(_noted)


def quiet_bystanders() -> None:
    """Silence what transformers and PEFT import because it is installed, though nothing here asked for it.

    torchao and bitsandbytes warn at import of GPU libraries they cannot load and of kernels they would fetch; on a
    machine without NVIDIA that is six lines before the first of ours.  Their errors stay.  For the command line only.
    """
    for name in ("torchao", "bitsandbytes", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)


def forget_notes() -> None:
    """Start an empty list of notes (a new run in the same process)."""
    _noted.clear()


def _escape(line: str) -> str:
    return line.replace("[", r"\[")
