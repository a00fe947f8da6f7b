"""Memory and time, told before the run."""

from lumen.planner.estimate import MemoryEstimate, RunShape, estimate, run_shape
from lumen.planner.shape import LinearShape, ModelShape
from lumen.planner.trace import Saved, saved_for_backward

__all__ = [
    "LinearShape",
    "MemoryEstimate",
    "ModelShape",
    "RunShape",
    "Saved",
    "estimate",
    "run_shape",
    "saved_for_backward",
]
