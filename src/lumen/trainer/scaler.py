"""Loss scaling for fp16.

fp16 holds 6e-8 to 65,504: gradients of activations often lie below.  The loss is multiplied with a large power of two
before backward and the gradients divided by it after.  Too large a scale overflows to infinity: that step is skipped
and the scale halved; after `GROWTH_INTERVAL` good steps it is doubled.  A power of two changes no mantissa bit.
"""

from __future__ import annotations

from dataclasses import dataclass

GROWTH_INTERVAL = 2000


@dataclass
class LossScaler:
    """scale: 1 and constant where `enabled` is false (bf16, fp32)."""

    enabled: bool = False
    scale: float = 65536.0
    good_steps: int = 0

    def __post_init__(self) -> None:
        if not self.enabled:
            self.scale = 1.0

    def update(self, finite: bool) -> bool:
        """After a step; returns whether a non-finite gradient is explained by the scale (which then shrinks)."""
        if not self.enabled:
            return False
        if finite:
            self.good_steps += 1
            if self.good_steps >= GROWTH_INTERVAL:
                self.scale, self.good_steps = min(self.scale * 2, 2.0**24), 0
            return False
        self.good_steps = 0
        if self.scale <= 1.0:
            return False
        self.scale /= 2
        return True

    def state(self) -> dict[str, float]:
        """For the checkpoint."""
        return {"scale": self.scale, "good_steps": self.good_steps} if self.enabled else {}

    def load_state(self, state: dict[str, float]) -> None:
        """Go on from a checkpoint; an empty state keeps the start value."""
        if self.enabled and state:
            self.scale, self.good_steps = float(state["scale"]), int(state["good_steps"])
