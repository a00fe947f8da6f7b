"""`FileConfig`: everything a configuration file may say, which is a RunConfig and the keys of later rooms.

Rooms after the trainer (export, and later serve) have keys of their own; a file may hold them beside the run's, as
LLaMA-Factory's merge files do.  A FileConfig is a RunConfig, so it is passed wherever one is asked for.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, SecretStr

from lumen.config.keys import foreign_keys
from lumen.core import Config
from lumen.export.config import ExportConfig
from lumen.trainer.config import RunConfig

COMMAND_LINE_ONLY = frozenset({"allow_remote_code"})
"""Fields that a file may not set, because a file can come from somebody else."""


class FileConfig(RunConfig, ExportConfig):
    """Every key of Lumen's configuration files."""


def owners() -> list[tuple[type[Config], list[str]]]:
    """Each mixin with the names of its own fields, in the order in which a run uses them."""
    rooms = ("models", "adapters", "quant", "data", "objectives", "trainer", "optim", "memory", "monitor", "generate")
    mixins = {base.__module__.split(".")[1]: base for base in RunConfig.__bases__ if issubclass(base, Config)}
    first = [mixins.pop(room) for room in rooms]
    order: list[type[Config]] = [*first, *mixins.values(), ExportConfig]
    return [(mixin, [name for name in mixin.model_fields if name in mixin.__annotations__]) for mixin in order]


def _members(annotation: Any) -> Iterator[Any]:
    """An annotation's alternatives, without Annotated and Union around them."""
    origin = get_origin(annotation)
    if origin in (Union, types.UnionType):
        for part in get_args(annotation):
            yield from _members(part)
    elif hasattr(annotation, "__metadata__"):
        yield from _members(get_args(annotation)[0])
    else:
        yield annotation


def choices(model: type[BaseModel], field: str) -> list[Any]:
    """The values a Literal field allows; empty where it is not one."""
    found: list[Any] = []
    for member in _members(model.model_fields[field].annotation):
        if get_origin(member) is Literal:
            found += get_args(member)
    return found


def section(model: type[BaseModel], field: str) -> type[BaseModel] | None:
    """The model of a nested section or of a list of sections, or None for a plain value."""
    info = model.model_fields.get(field)
    for member in _members(info.annotation) if info else ():
        if get_origin(member) is list:
            member = next(_members(get_args(member)[0]))
        if isinstance(member, type) and issubclass(member, BaseModel):
            return member
    return None


def is_secret(name: str) -> bool:
    """Whether a key's value must never be printed or written."""
    info = FileConfig.model_fields.get(name)
    if info is not None and SecretStr in set(_members(info.annotation)):
        return True
    return any(name.endswith(end) for end in ("token", "api_key", "secret", "webhook_url", "password"))


def dump(run: RunConfig) -> dict[str, Any]:
    """The resolved configuration as JSON values, without secrets; `load` reads it back to an equal one."""
    hidden = {name for name in type(run).model_fields if is_secret(name)} | COMMAND_LINE_ONLY
    return run.model_dump(mode="json", exclude=hidden)


def json_schema() -> dict[str, Any]:
    """JSON schema of a configuration file, for editors."""
    schema = FileConfig.model_json_schema()
    for name in COMMAND_LINE_ONLY:
        schema["properties"].pop(name, None)
    quant = schema["properties"]["quant"]
    schema["properties"]["quant"] = {"anyOf": [{"$ref": quant.pop("$ref")}, {"type": "string"}], **quant}
    for key in foreign_keys().values():  # an editor should not flag keys that are accepted
        if key.status != "refused":
            schema["properties"][key.name] = {"description": f"{key.why} ({key.origin})", "deprecated": True}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "Lumen configuration"}
