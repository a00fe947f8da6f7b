"""What is learned."""

from __future__ import annotations

from typing import Literal

from lumen.core import Config


class ObjectiveConfig(Config):
    """The training stage."""

    stage: Literal["sft", "pt"] = "sft"
    """sft: supervised fine-tuning; pt: plain text, packed. Default: sft."""
