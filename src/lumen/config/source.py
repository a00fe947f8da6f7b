"""A YAML (or JSON) file as plain values, with the line of every key.

PyYAML keeps the last of two equal keys and forgets where a key stood; here a duplicate is an error and every error
can name `file:line`.  Scalars follow YAML 1.2's core where 1.1 surprises: `1e-4` is a number, `010` and `1:30` and
dates are text; `yes/no/on/off` stay booleans, as people's files expect.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from lumen.core import ConfigError

MAX_NODES = 100_000
_DEEP = re.compile(r"(?:[\[{]\s*){64}")
"""Brackets in brackets that no configuration needs; PyYAML takes seconds over thousands of them."""


class _Loader(yaml.SafeLoader):
    """SafeLoader with our scalars; it constructs plain values only."""


_KEPT = ("tag:yaml.org,2002:bool", "tag:yaml.org,2002:null", "tag:yaml.org,2002:merge")
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag in _KEPT]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:int", re.compile(r"^[-+]?(?:0|[1-9][0-9_]*|0x[0-9a-fA-F]+)$"), list("-+0123456789")
)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(
        r"^[-+]?(?:(?:[0-9][0-9_]*)?\.[0-9]+|[0-9][0-9_]*\.)(?:[eE][-+]?[0-9]+)?$"
        r"|^[-+]?[0-9][0-9_]*[eE][-+]?[0-9]+$|^[-+]?\.(?:inf|Inf|INF)$|^\.(?:nan|NaN|NAN)$"
    ),
    list("-+0123456789."),
)


@dataclass
class Source:
    """Values of one file and where its keys stand."""

    values: dict[str, Any]
    name: str
    lines: dict[str, int] = field(default_factory=dict)

    def where(self, key: str) -> str:
        """`file:line` of a dotted key, or of the nearest section around it."""
        while key and key not in self.lines:
            key = key.rpartition(".")[0]
        return f"{self.name}:{self.lines[key]}" if key else self.name


def read_file(path: str | Path) -> Source:
    """Read a configuration file; raises ConfigError with file:line for anything that is not one mapping."""
    path = Path(path)
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        raise ConfigError("there is no such configuration file", where=str(path), fix="check the path") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"this file cannot be read: {error}", where=str(path)) from None
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        raise ConfigError(
            f"byte 0x{raw[error.start]:02x} is not UTF-8 text", where=f"{path}:{line}", fix="save the file as UTF-8"
        ) from None
    if path.suffix == ".json":
        text = text.replace("\t", "  ")  # JSON may be indented with tabs; its strings cannot hold one
    return parse(text, str(path))


def parse(text: str, name: str) -> Source:
    """Parse YAML text whose top is a mapping; `name` stands in error messages."""
    if (deep := _DEEP.search(text)) is not None:
        line = text.count("\n", 0, deep.start()) + 1
        raise ConfigError("this YAML is nested too deeply", where=f"{name}:{line}")
    loader = None
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        return _Builder(loader, name).source(node)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{name}:{mark.line + 1}" if mark else name
        problem = " ".join(part for part in (error.context, error.problem) if part)
        raise ConfigError(f"this is not valid YAML: {problem}", where=where) from None
    except yaml.reader.ReaderError as error:
        raise ConfigError(f"this is not text: character #x{ord(str(error.character)[:1]):04x}", where=name) from None
    except RecursionError:
        raise ConfigError("this YAML is nested too deeply", where=name) from None
    finally:
        if loader is not None:
            loader.dispose()


def parse_value(text: str) -> Any:
    """A value from the command line: YAML where it reads as YAML, else the text itself."""
    if not text.strip():
        return text
    try:
        values = parse(f"{{value: {text}\n}}", "command line").values
        return values["value"] if list(values) == ["value"] else text
    except ConfigError:
        return text


class _Builder:
    """Turns YAML nodes into values, noting lines, refusing duplicates, cycles and alias bombs."""

    def __init__(self, loader: _Loader, name: str) -> None:
        self.loader = loader
        self.name = name
        self.lines: dict[str, int] = {}
        self.open: set[int] = set()
        self.count = 0

    def source(self, node: yaml.Node | None) -> Source:
        if node is None:
            return Source({}, self.name)
        if not isinstance(node, yaml.MappingNode):
            raise ConfigError("the file must hold `key: value` lines", where=f"{self.name}:{node.start_mark.line + 1}")
        return Source(self.build(node, ""), self.name, self.lines)

    def build(self, node: yaml.Node, path: str) -> Any:
        self.count += 1
        if self.count > MAX_NODES:
            raise self.error("this file holds too many values (aliases that repeat themselves?)", node)
        if id(node) in self.open:
            raise self.error("an alias here contains itself", node)
        if isinstance(node, yaml.ScalarNode):
            try:
                return self.loader.construct_object(node)
            except (ValueError, TypeError, AttributeError, LookupError, ArithmeticError) as error:  # odd explicit tags
                raise self.error(f"this value cannot be read: {error}", node) from None
        self.open.add(id(node))
        try:
            if isinstance(node, yaml.SequenceNode):
                return [self.build(item, f"{path}.{i}" if path else str(i)) for i, item in enumerate(node.value)]
            assert isinstance(node, yaml.MappingNode)
            return self.mapping(node, path)
        finally:
            self.open.discard(id(node))

    def mapping(self, node: yaml.MappingNode, path: str) -> dict[str, Any]:
        own: dict[str, int] = {}
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key = self.key(key_node)
            line = key_node.start_mark.line + 1
            if key in own:
                raise ConfigError(
                    f"`{key}` is given twice, on lines {own[key]} and {line}",
                    where=f"{self.name}:{line}",
                    fix="keep one of them",
                )
            own[key] = line
        self.loader.flatten_mapping(node)
        built: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = self.key(key_node)
            dotted = f"{path}.{key}" if path else key
            self.lines[dotted] = key_node.start_mark.line + 1
            built[key] = self.build(value_node, dotted)
        return built

    def key(self, node: yaml.Node) -> str:
        if not isinstance(node, yaml.ScalarNode):
            raise self.error("a key must be a word", node)
        return str(node.value)

    def error(self, what: str, node: yaml.Node) -> ConfigError:
        return ConfigError(what, where=f"{self.name}:{node.start_mark.line + 1}")
