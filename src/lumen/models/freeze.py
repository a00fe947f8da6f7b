"""What trains: everything, some layers, or nothing (before adapters are injected).

`freeze` trains the last n decoder layers, or with a negative n the first; inside them all modules or named ones; and
named modules elsewhere (embedding, final norm, head).  A parameter that does not train gets no gradient and no
optimizer state, so memory falls with it.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from lumen.core import ModelError
from lumen.models.config import ModelConfig
from lumen.models.layers import decoder_layers, matches, stores_codes, unknown_module


@dataclass(frozen=True)
class ParameterCount:
    """Numbers of parameters; tied ones count once."""

    trainable: int
    total: int

    @property
    def percent(self) -> float:
        return 100.0 * self.trainable / self.total if self.total else 0.0

    def __str__(self) -> str:
        return f"{self.trainable:,} of {self.total:,} parameters train ({self.percent:.2f} %)"


def count_parameters(model: nn.Module) -> ParameterCount:
    """Trainable and all parameters.  A frozen layer held as codes counts the weights that it stands for."""
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    total, inside = 0, set()
    for module in model.modules():
        if isinstance(module, nn.Linear) and stores_codes(module):
            total += module.in_features * module.out_features
            inside |= {id(p) for name, p in module._parameters.items() if p is not None and name != "bias"}
    return ParameterCount(trainable, total + sum(p.numel() for p in model.parameters() if id(p) not in inside))


def freeze_all(model: nn.Module) -> None:
    """Nothing trains."""
    for parameter in model.parameters():
        parameter.requires_grad_(False)


def train_all(model: nn.Module) -> None:
    """Every floating-point parameter trains."""
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.requires_grad_(True)


def apply_freeze(model: nn.Module, config: ModelConfig, *, also: list[str] | None = None) -> list[str]:
    """`finetuning_type: freeze`; returns the names of the parameters that train.

    config: freeze_trainable_layers n (last n, negative: first), freeze_trainable_modules (names inside a layer, or
            all), freeze_extra_modules (names outside the layers).
    also:   leaf names of modules that must train because the vocabulary grew.

    Raises ModelError for 0 layers, more layers than there are, and names that match nothing.
    """
    prefix, layers = decoder_layers(model)
    n = config.freeze_trainable_layers
    if n == 0 or abs(n) > len(layers):
        raise ModelError(
            f"freeze_trainable_layers: {n} cannot be: the model has {len(layers)} decoder layers",
            where="freeze_trainable_layers",
            fix=f"1 to {len(layers)} for the last layers, -1 to -{len(layers)} for the first",
        )
    chosen = range(len(layers) - n, len(layers)) if n > 0 else range(-n)
    freeze_all(model)
    inner = {name for i in chosen for name, _ in layers[i].named_modules() if name}
    outer = {name for name, _ in model.named_modules() if name and not name.startswith(prefix + ".")}
    for i in chosen:
        for target in config.freeze_trainable_modules:
            _unfreeze(layers[i], target, inner, where="freeze_trainable_modules")
    for target in [*(config.freeze_extra_modules or []), *(also or [])]:
        if not any(matches(name, target) for name in outer):
            raise unknown_module(target, outer, where="freeze_extra_modules")
        for name, module in model.named_modules():
            if name in outer and matches(name, target):
                train_all(module)
    return [name for name, parameter in model.named_parameters() if parameter.requires_grad]


def _unfreeze(layer: nn.Module, target: str, names: set[str], *, where: str) -> None:
    if target == "all":
        train_all(layer)
        return
    if not any(matches(name, target) for name in names):
        raise unknown_module(target, names, where=where)
    for name, module in layer.named_modules():
        if name and matches(name, target):
            train_all(module)
