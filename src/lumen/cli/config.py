"""`lumen config`: the schema, the key table, and validation of a file."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="lumen config", description="Schema, keys and validation of configurations.")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="schema | validate | keys")
    verbs.add_parser("schema", help="print the JSON schema of a configuration file")
    validate = verbs.add_parser("validate", help="print a file's resolved keys and what was noted")
    validate.add_argument("file")
    validate.add_argument("overrides", nargs=argparse.REMAINDER, help="key=value, --key value")
    validate.add_argument("--all", action="store_true", help="also keys that stand at their default")
    keys = verbs.add_parser("keys", help="print every key, its default and what it does")
    keys.add_argument("name", nargs="?", help="only keys whose name holds this")
    arguments = parser.parse_args(argv)
    if arguments.verb == "schema":
        from lumen.config import json_schema

        print(json.dumps(json_schema(), indent=2, ensure_ascii=False))
        return 0
    if arguments.verb == "keys":
        from lumen.config.pages import key_lines

        lines = key_lines(arguments.name or "")
        print("\n".join(lines) if lines else f"no key holds {arguments.name!r}")
        return 0 if lines else 1
    return _validate(arguments)


def _pruned(value: Any) -> Any:
    """A section without what it leaves open."""
    if isinstance(value, dict):
        return {name: _pruned(inner) for name, inner in value.items() if inner not in (None, [])}
    return [_pruned(inner) for inner in value] if isinstance(value, list) else value


def _validate(arguments: argparse.Namespace) -> int:
    import yaml

    from lumen.config import dump, load

    overrides = list(arguments.overrides)
    everything = arguments.all or "--all" in overrides
    loaded = load(arguments.file, [word for word in overrides if word != "--all"])
    for line in loaded.notes:
        print(f"note: {line}", file=sys.stderr)
    resolved = dump(loaded.run)
    if not everything:
        resolved = {name: _pruned(value) for name, value in resolved.items() if name in loaded.given}
    print(yaml.safe_dump(resolved, sort_keys=False, allow_unicode=True, default_flow_style=None), end="")
    print(f"{arguments.file} is valid", file=sys.stderr)
    return 0
