"""quantize and dequantize: the two verbs.

    report = lumen.quantize(model, "int8")          # in place; before or after an adapter is injected
    lumen.dequantize(model)                         # the module tree and the state_dict keys as they were

They exchange nn.Linear layers for QuantLinear ones and back; nothing is patched and nothing stays behind, so they work
inside any training loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from lumen.core import QuantError
from lumen.quant import recipes
from lumen.quant.config import QuantConfig, QuantSection
from lumen.quant.conv import QuantConv1D
from lumen.quant.experts import QuantStack, unwrap, wrap
from lumen.quant.gemm import Codes
from lumen.quant.linear import QuantLinear
from lumen.quant.live import Clock
from lumen.quant.modules import Found, is_conv1d, linear_layers, plain_name
from lumen.quant.plan import LayerPlan, plan_layer
from lumen.quant.policy import GEMMS, Policy
from lumen.quant.report import Report, report
from lumen.quant.smooth import calibrate, waiting
from lumen.quant.target import in_dialect, resolve

Recipe = str | Policy | QuantSection | QuantConfig | Mapping[str, Any]


def as_policy(recipe: Recipe) -> Policy:
    """A recipe's name, a Policy, a `quant:` section or its dict → Policy.  Raises QuantError."""
    if isinstance(recipe, Policy):
        return recipe
    if isinstance(recipe, str):
        return recipes.recipe(recipe)
    if isinstance(recipe, QuantConfig):
        return recipe.quant.policy()
    if isinstance(recipe, QuantSection):
        return recipe.policy()
    if isinstance(recipe, Mapping):
        try:
            return QuantSection.model_validate(dict(recipe)).policy()
        except QuantError:
            raise
        except ValueError as error:
            raise QuantError(f"this is not a quant section: {error}") from None
    raise QuantError(f"a recipe is a name, a Policy or a dict, not {type(recipe).__name__}")


def quantize(
    model: nn.Module,
    recipe: Recipe,
    *,
    frozen: bool | Callable[[str], bool] | None = None,
    target: str | None = None,
    seed: int = 0,
    calibration: Iterable[Mapping[str, Any]] | None = None,
) -> Report:
    """Quantise a model's linear layers in place.

    recipe: a name of `quant.recipes`, a Policy, or a dict like the YAML section (`{"weight": "int8:row", …}`).
    frozen: whether weights never get a gradient (they are then stored as codes); a function decides per module name.
            Default: as `requires_grad` says now, so freeze before, or say True when an adapter will be injected after.
    target: the chip whose numbers are computed (FP8's dialect) and which the report is for: `gfx942`, `MI300X`, `cpu`;
            default: the one the weights are on.
    seed:   of stochastic rounding.
    calibration: keyword arguments of the model's forward, batch by batch, on which `+smooth` is measured.  Without it
            each such layer measures its first input and stays in high precision until then.

    Before anything is changed it raises QuantError (unknown recipe, format not built, rule without a module, model
    quantised already) and HardwareError (unknown target).
    """
    _check_bare(model, "quantise")
    policy = as_policy(recipe)
    target = resolve(target or named_target(recipe), _device(model))
    if any(isinstance(m, (QuantLinear, QuantStack)) for m in model.modules()):
        raise QuantError(
            "this model is quantised already",
            fix="call lumen.dequantize(model) first, then quantise with the new recipe",
        )
    exchange(model, plan_model(model, policy, frozen, target=target))
    start_layers(model, seed)
    if calibration is not None:
        if not waiting(model):
            raise QuantError(f"recipe {policy.name!r} has nothing to calibrate", fix="leave calibration out")
        calibrate(model, calibration)
    return report(model, policy.name, target)


def plan_model(
    model: nn.Module, policy: Policy, frozen: bool | Callable[[str], bool] | None = None, *, target: str
) -> dict[str, LayerPlan]:
    """Path → plan of every layer that the policy quantises, for one architecture; also of a model on the meta device.

    Raises QuantError as `quantize` does, and changes nothing.
    """
    recipes.check_available(policy)
    found = list(linear_layers(model))
    policy.check_matches([f.name for f in found])
    plans: dict[str, LayerPlan] = {}
    for layer in found:
        plan = plan_layer(policy, layer.name, frozen=_is_frozen(layer, frozen), protected=bool(layer.protected))
        if not plan.active:
            continue
        plan = in_dialect(plan, target, layer.name)
        _check_rows(layer, plan)
        if layer.parameter != "weight" and (plan.tracked or plan.waits):
            raise QuantError(
                f"{'smoothing' if plan.waits else 'scales from a history'} is not built for stacked experts",
                where=layer.name,
                fix='use a recipe with dynamic scales, or leave them out: rules: [{match: "*.experts.*", weight: none, '
                "input: none, grad_output: none}]",
            )
        if layer.tied:
            raise tied_head(layer.name)
        plans[layer.path] = plan
    kept = [rule for rule in policy.rules if rule.role == "saved_input" and rule.spec is not None]
    if kept and plans and all(plan.frozen for plan in plans.values()):
        raise QuantError(
            f"saved_input: {kept[0].spec} would do nothing: frozen layers keep no input for wgrad",
            fix="leave saved_input out, or train the layers' own weights",
        )
    if policy.specs() and not plans:
        raise QuantError(
            f"recipe {policy.name!r} quantises no layer of this {type(model).__name__}",
            fix="linear layers and experts are quantised; the output head, routers and embeddings stay as they are",
        )
    return plans


def named_target(recipe: Recipe) -> str | None:
    """The chip that a section names with `target:`."""
    if isinstance(recipe, QuantConfig):
        return recipe.quant.target
    if isinstance(recipe, QuantSection):
        return recipe.target
    return recipe.get("target") if isinstance(recipe, Mapping) else None


def _check_bare(model: nn.Module, verb: str) -> None:
    """FSDP2 and DDP hold on to the very parameters that they found; exchanging them afterwards goes unseen."""
    if isinstance(model, nn.parallel.DistributedDataParallel) or any(
        hasattr(parameter, "placements") for parameter in model.parameters()
    ):
        raise QuantError(
            f"this model is wrapped by DDP or sharded by FSDP2 already; it is too late to {verb} it",
            fix="quantise before wrapping; to go back, gather a full state dict and load it into one process",
        )


def _device(model: nn.Module) -> torch.device:
    return next((p.device for p in model.parameters()), torch.device("cpu"))


def dequantize(model: nn.Module) -> None:
    """Put nn.Linear layers back, in place: masters as they are, frozen codes as the values they stood for.

    A model that is not quantised is left as it is.  Weights require gradients as they did before quantising; below an
    adapter, frozen ones stay frozen.  Raises QuantError for a model that is sharded.
    """
    _check_bare(model, "dequantise")
    made: dict[int, nn.Linear] = {}
    of_codes: dict[int, nn.Parameter] = {}
    has_adapter = any(hasattr(m, "base_layer") for m in model.modules())
    for path, module in list(model.named_modules(remove_duplicate=False)):
        if isinstance(module, QuantLinear):
            adapted = "base_layer" in path.split(".")
            linear = made.setdefault(id(module), module.to_linear(adapted=adapted))
            weight = linear._parameters["weight"]
            assert weight is not None
            linear.weight = of_codes.setdefault(id(module._parameters["weight"]), weight)
            put_module(model, path, linear)
        unwrap(module, adapted=has_adapter)


def tied_head(name: str) -> QuantError:
    """The error for a rule that names a head whose weight is the embedding's."""
    return QuantError(
        "the output head shares its weight with the embedding and cannot be quantised alone",
        where=name,
        fix="leave it out of the rules, or untie the model first",
    )


def _check_rows(layer: Found, plan: LayerPlan) -> None:
    """ggml's blocks need rows of whole blocks; said here, before anything is changed."""
    for gemm in GEMMS:
        for spec in (plan.gemm(gemm).left, plan.gemm(gemm).right):
            if spec is not None and spec.element in ("q8_0", "q4_0") and layer.in_features % 32:
                raise QuantError(
                    f"{spec.element} needs rows of a multiple of 32 values, not {layer.in_features}",
                    where=layer.name,
                    fix=f'leave it out: rules: [{{match: "{layer.name}", weight: none}}]',
                )


def exchange(model: nn.Module, plans: Mapping[str, LayerPlan]) -> None:
    """Put the quantised twins of the layers at these paths in their places."""
    made: dict[int, QuantLinear] = {}
    of_weight: dict[tuple[int, LayerPlan], QuantLinear] = {}
    for path, plan in plans.items():
        parent, _, name = path.rpartition(".")
        owner = model.get_submodule(parent)
        if name in owner._parameters:
            wrap(owner, name, plan)
            continue
        module = owner._modules[name]
        assert module is not None
        if id(module) not in made:
            layer = made[id(module)] = twin(module, plan)
            layer.share_codes(of_weight.setdefault((id(module._parameters["weight"]), plan), layer))
        put_module(model, path, made[id(module)])


def twin(module: nn.Module, plan: LayerPlan, weight: torch.Tensor | Codes | None = None) -> QuantLinear:
    """The quantised twin of an nn.Linear or Conv1D; `weight` instead of its own, where that is not loaded yet."""
    kind = QuantConv1D if is_conv1d(module) else QuantLinear
    return kind.from_linear(module, plan, weight)  # type: ignore[arg-type]


def start_layers(model: nn.Module, seed: int = 0) -> None:
    """Give every quantised layer its name and the model's one clock."""
    clock = Clock(seed)
    for path, module in model.named_modules():
        if isinstance(module, (QuantLinear, QuantStack)):
            module.start(plain_name(path), clock)


def put_module(model: nn.Module, path: str, module: nn.Module) -> None:
    """Hang a module at a dotted path."""
    if not path:
        raise QuantError("the model itself is one linear layer", fix="wrap it: torch.nn.Sequential(layer)")
    parent, _, name = path.rpartition(".")
    owner: Any = model.get_submodule(parent)
    owner._modules[name] = module
    if hasattr(owner, "fan_in_fan_out"):  # PEFT's layer: whether its base lies like a Conv1D
        owner.fan_in_fan_out = not isinstance(module, nn.Linear)


def _is_frozen(layer: Found, frozen: bool | Callable[[str], bool] | None) -> bool:
    if frozen is None:
        return not layer.weight.requires_grad
    return frozen(layer.name) if callable(frozen) else frozen
