"""Quantise while loading: no dense copy of the model ever exists.

A 7-billion-parameter model in bf16 is 15 GB; its NF4 codes are 3.6 GB.  Loading first and quantising then needs the 15.
Here the model is planned as an empty skeleton (the meta device), and each weight becomes codes as soon as it has been
read: the peak is the codes so far and one tensor.  The codes are those of loading first, bit for bit, since both
quantise the same values in the same dtype.

The one who reads (lumen.models) asks `takes(name)` and hands over `take(model, name, value)`, where the value is a
dense tensor or the keys of a weight that is stored as codes already (quant.layouts), which are taken as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from lumen.core import QuantError
from lumen.formats import QuantSpec
from lumen.quant.api import (
    Recipe,
    as_policy,
    exchange,
    named_target,
    plan_model,
    put_module,
    start_layers,
    tied_head,
    twin,
)
from lumen.quant.experts import QuantStack, wrap
from lumen.quant.layouts import from_disk
from lumen.quant.linear import QuantLinear
from lumen.quant.plan import LayerPlan
from lumen.quant.policy import Policy
from lumen.quant.report import Report, report
from lumen.quant.target import resolve


class Stream:
    """One model's quantisation while it is loaded.

    recipe: as `lumen.quantize` takes it.
    frozen: whether weights never get a gradient; only those are kept as codes, others are quantised once loaded.
    specs:  module name → spec in which the checkpoint stores it, where it holds codes.
    target: the chip whose numbers are computed, as `lumen.quantize` takes it.
    """

    def __init__(
        self,
        recipe: Recipe,
        *,
        frozen: bool | Callable[[str], bool] = True,
        specs: Mapping[str, QuantSpec] | None = None,
        target: str | None = None,
    ) -> None:
        self.policy: Policy = as_policy(recipe)
        self.target = target or named_target(recipe)
        self.device: torch.device | str = "cpu"  # where the model will be; the one who reads says it
        self.frozen = frozen
        self.specs = dict(specs or {})
        self.plans: dict[str, LayerPlan] = {}
        self.paths: dict[str, list[str]] = {}
        self.failure: Exception | None = None

    def prepare(self, model: nn.Module) -> None:
        """Plan the skeleton of a model.  Raises QuantError as `lumen.quantize` does, before anything is read."""
        self.target = resolve(self.target, self.device)
        self.plans = plan_model(model, self.policy, self.frozen, target=self.target)
        head = getattr(model, "get_output_embeddings", lambda: None)()
        tied = getattr(getattr(model, "config", None), "tie_word_embeddings", False)
        for path in self.plans:  # a skeleton is not tied yet, so the planner could not see it
            owner, name = _owner(model, path)
            if tied and head is not None and owner._modules.get(name) is head:
                raise tied_head(path)
        places: dict[Any, list[str]] = {}
        for path in self.plans:
            owner, name = _owner(model, path)
            key = (id(owner), name) if name in owner._parameters else id(owner._modules[name])
            places.setdefault(key, []).append(path)
        self.paths = {path: group for group in places.values() for path in group if self.plans[path].stores_codes}
        for name, spec in self.specs.items():
            plan = self.plans.get(name)
            if plan is None or not plan.stores_codes or plan.forward.right != spec:
                wanted = plan.forward.right if plan is not None else "high precision"
                raise QuantError(
                    f"the checkpoint stores this weight as {spec}, the recipe wants {wanted}",
                    where=name,
                    fix="leave `quant` out to train on the codes as they are, or load the original weights",
                )

    def takes(self, parameter: str) -> bool:
        """Whether the parameter of this dotted name is to be handed over with `take`."""
        return self._path(parameter) in self.paths

    def _path(self, parameter: str) -> str:
        """The layer's path of a parameter: without `.weight`, or itself where it is a stack of experts."""
        return parameter if parameter in self.paths else parameter.removesuffix(".weight")

    @torch.no_grad()
    def take(self, model: nn.Module, parameter: str, value: torch.Tensor | Mapping[str, torch.Tensor]) -> None:
        """Quantise a weight that has just been read and put its layer in place.

        value: dense [N, K], or suffix → tensor of a weight in codes (`layouts.to_disk`).
        """
        path = self._path(parameter)
        plan, (owner, name) = self.plans[path], _owner(model, path)
        is_stack = name in owner._parameters
        own = owner._parameters[name] if is_stack else owner._modules[name]._parameters["weight"]  # type: ignore[union-attr]
        assert own is not None and plan.forward.right is not None
        weight: torch.Tensor | tuple[torch.Tensor, ...]
        if isinstance(value, torch.Tensor):
            _check_shape(tuple(value.shape), tuple(own.shape), parameter)
            weight = value
        else:
            stored = from_disk(value, plan.forward.right, parameter)
            if stored.shape is not None and not is_stack:
                module = owner._modules[name]
                shape = tuple(own.shape) if isinstance(module, nn.Linear) else tuple(own.shape[::-1])
                _check_shape(stored.shape, shape, parameter)
            weight = stored.parts
        if is_stack:
            wrap(owner, name, plan, weight)
            return
        module = owner._modules[name]
        assert module is not None
        layer = twin(module, plan, weight)
        for place in self.paths[path]:
            put_module(model, place, layer)

    def finish(self, model: nn.Module) -> Report:
        """Quantise what was left in high precision (layers that keep a master) and report.

        Raises QuantError where a weight was never handed over.
        """
        rest = {path: plan for path, plan in self.plans.items() if path not in self.paths}
        missing = [path for path in self.paths if not isinstance(_held(model, path), (QuantLinear, QuantStack))]
        if missing:
            raise QuantError(
                f"the checkpoint holds no weight for {len(missing)} layers, {missing[0]} among them",
                where="model_name_or_path",
                fix="check that all shards are there and that config.json belongs to them",
            )
        exchange(model, rest)
        start_layers(model)
        return report(model, self.policy.name, self.target)


def _owner(model: nn.Module, path: str) -> tuple[nn.Module, str]:
    """The module that a layer hangs in, and its name there."""
    parent, _, name = path.rpartition(".")
    return model.get_submodule(parent), name


def _held(model: nn.Module, path: str) -> Any:
    owner, name = _owner(model, path)
    return owner._modules.get(name)


def _check_shape(found: tuple[int, ...], expected: tuple[int, ...], where: str) -> None:
    if found != expected:
        raise QuantError(
            f"the weight in the file is {list(found)}, the model wants {list(expected)}",
            where=where,
            fix="check that config.json belongs to these weights",
        )
