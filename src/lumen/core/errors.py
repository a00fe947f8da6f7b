"""Errors a user can act on: what is wrong, where, and how to fix it.

Every mistake in a user's file, configuration or machine is raised as a `LumenError`.  It is a `ValueError`, so code
that embeds Lumen can catch it as one; the command line prints it without a traceback and exits with status 2.
"""

from __future__ import annotations


class LumenError(ValueError):
    """A mistake in the user's input.

    what:  one sentence that names the problem.
    where: `file:line`, a key, a row, a module name; empty when there is no place.
    fix:   what to do about it; empty when `what` says so already.
    """

    def __init__(self, what: str, *, where: str = "", fix: str = "") -> None:
        self.what = what
        self.where = where
        self.fix = fix
        super().__init__(str(self))

    def __str__(self) -> str:
        lines = [self.what]
        if self.where:
            lines.append(f"  where: {self.where}")
        if self.fix:
            lines.append(f"  fix:   {self.fix}")
        return "\n".join(lines)


class ConfigError(LumenError):
    """A key or value of the configuration, or a conflict between two."""


class DataError(LumenError):
    """A data file, a row, or what is left of them."""


class ModelError(LumenError):
    """A model, tokenizer or adapter that cannot be loaded or does not fit."""


class QuantError(LumenError):
    """A format, rule or recipe that does not exist or cannot be applied."""


class CheckpointError(LumenError):
    """A checkpoint that is missing, damaged, or belongs to another run."""


class HardwareError(LumenError):
    """Something this machine does not have."""
