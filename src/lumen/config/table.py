"""The table's rows: what becomes of a key that other tools know.

A key either *acts* (it is a field of the configuration, or is translated or renamed to one), is a *noted no-op*
(accepted, changes nothing, and one line says why), or is *refused* by name.  A no-op or refused key at its neutral
value, the value with which it does nothing in the tool it comes from, is silent: widely shared files spell such
defaults out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Status = Literal["acts", "no-op", "refused"]
LF, HF, OLD, OWN = "LLaMA-Factory", "Transformers", "older releases", "Lumen"


@dataclass(frozen=True)
class Key:
    """One foreign key.

    why:     one line: the reason of a no-op or refusal, or what the key is read as.
    neutral: the value with which the key does nothing in its own tool.
    """

    name: str
    origin: str
    status: Status
    why: str
    neutral: Any = None

    def is_neutral(self, value: Any) -> bool:
        """Whether `value` is null or the neutral value, also when written as text."""
        if value is None or value in ([], {}) or value == self.neutral:
            return True
        if isinstance(value, str):
            text = value.strip().lower()
            no = ("no", "off") if self.neutral is False else ()
            return text in ("", "none", "null", str(self.neutral).lower(), *no)
        return False


def noop(origin: str, why: str, **neutral: Any) -> list[Key]:
    """Keys that are accepted and change nothing, for one reason."""
    return [Key(name, origin, "no-op", why, value) for name, value in neutral.items()]


def refuse(origin: str, why: str, **neutral: Any) -> list[Key]:
    """Keys that are refused unless neutral, for one reason."""
    return [Key(name, origin, "refused", why, value) for name, value in neutral.items()]


def acts(origin: str, **read_as: str) -> list[Key]:
    """Keys that are not fields but are read as one (`translate.py`)."""
    return [Key(name, origin, "acts", f"read as {target}") for name, target in read_as.items()]
