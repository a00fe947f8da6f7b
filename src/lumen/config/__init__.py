"""Loads the configuration of a run: YAML with line numbers, overrides, suggestions, the table of foreign keys."""

from lumen.config.keys import RENAMED, foreign_keys
from lumen.config.load import LoadedConfig, load
from lumen.config.rules import check
from lumen.config.schema import FileConfig, dump, json_schema

__all__ = ["RENAMED", "FileConfig", "LoadedConfig", "check", "dump", "foreign_keys", "json_schema", "load"]
