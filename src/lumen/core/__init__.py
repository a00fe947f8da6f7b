"""Errors, the Config base, atomic files, counter-based randomness, logging. Imports nothing of lumen."""

from lumen.core.config import Config, Count, Float, Int, NonNegative, Positive, PositiveShare, Share, Size, StrList
from lumen.core.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    HardwareError,
    LumenError,
    ModelError,
    QuantError,
)
from lumen.core.log import note, notes, say, warn

__all__ = [
    "CheckpointError", "Config", "ConfigError", "Count", "DataError", "Float", "HardwareError", "Int", "LumenError",
    "ModelError", "NonNegative", "Positive", "PositiveShare", "QuantError", "Share", "Size", "StrList", "note",
    "notes", "say", "warn",
]  # fmt: skip
