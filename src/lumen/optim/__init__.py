"""Optimizers on one functional step: named states, fp32 or stochastically rounded masters, parameter groups."""

from lumen.optim.adamw import SGD, AdamW
from lumen.optim.base import NamedOptimizer
from lumen.optim.clip import clip_factor, grad_norm, scale_grads
from lumen.optim.groups import parameter_groups
from lumen.optim.names import make_optimizer, resolve_name

__all__ = [
    "SGD", "AdamW", "NamedOptimizer", "clip_factor", "grad_norm", "make_optimizer", "parameter_groups", "resolve_name",
    "scale_grads",
]  # fmt: skip
