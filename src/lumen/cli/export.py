"""`lumen export`: LLaMA-Factory's name of merging; the same command as `lumen merge`."""

from __future__ import annotations


def main(argv: list[str]) -> int:
    from lumen.cli import merge

    return merge.main(argv, verb="export")
