"""Checkpoints whose weights are codes already: which format each module's weight has, from config.json and the keys.

    bitsandbytes         NF4, with or without double quantisation (its files explain themselves)
    compressed-tensors   symmetric int8, int4 and fp8, per channel, tensor, group or block
    lumen                what `models.save_codes` wrote: module name → spec

The codes are taken as they are: nothing is rounded twice, and saving them again gives the same bytes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch

from lumen.core import ModelError
from lumen.formats import QuantSpec
from lumen.models.streaming import CodesInFile
from lumen.quant.layouts import STATE, SUFFIXES
from lumen.quant.policy import Policy, Rule

METHODS = ("bitsandbytes", "compressed-tensors", "lumen")
_KEY = "quantization_config"


def stored_specs(settings: Mapping[str, Any], state: Mapping[str, Any]) -> dict[str, QuantSpec]:
    """Module name → spec of its stored weight.

    settings: config.json's `quantization_config`.  state: name → slice of every tensor.
    Raises ModelError for a kind of codes that is not read.
    """
    method = settings.get("quant_method")
    if method == "lumen":
        return {name: QuantSpec.parse(text) for name, text in settings.get("modules", {}).items()}
    if method == "bitsandbytes":
        return _bitsandbytes(state)
    modules = [key.rpartition(".")[0] for key in state if key.endswith(".weight_scale")]
    return dict.fromkeys(modules, _compressed_spec(settings)) if modules else {}


def stored_policy(settings: Mapping[str, Any], specs: Mapping[str, QuantSpec]) -> Policy:
    """Each stored weight as its file has it; inputs as compressed-tensors asks for, else in high precision."""
    rules = [Rule(name, "weight", "*", spec) for name, spec in specs.items()]
    inputs = _compressed_inputs(settings) if settings.get("quant_method") == "compressed-tensors" else None
    if inputs is not None:
        rules += [Rule(name, "input", "forward", inputs) for name in specs]
    return Policy(tuple(rules), f"as stored ({settings.get('quant_method')})")


def group_codes(
    state: Mapping[str, Any], specs: Mapping[str, QuantSpec], settings: Mapping[str, Any]
) -> dict[str, Any]:
    """The same state with the keys of each stored weight under one: `NAME.weight`, or a stack of experts' `NAME`."""
    stacks = set(settings.get("stacks") or ())
    grouped: dict[str, Any] = {}
    for key, part in state.items():
        module, _, suffix = key.partition(".weight")
        if module in specs and (suffix in SUFFIXES or suffix.startswith(".")):
            codes = grouped.setdefault(module if module in stacks else f"{module}.weight", CodesInFile({}))
            foreign = suffix == "_scale" and settings.get("quant_method") == "compressed-tensors"
            codes.slices[suffix] = _Scale(part, specs[module].granularity.kind == "tensor") if foreign else part
        else:
            grouped[key] = part
    return grouped


class _Scale:
    """compressed-tensors keeps scales in the model's dtype, one per tensor as [1]; here they are fp32, one as []."""

    def __init__(self, part: Any, scalar: bool) -> None:
        self.part, self.scalar = part, scalar

    def __getitem__(self, _: Any) -> torch.Tensor:
        scale = self.part[...].float()
        return scale.reshape(()) if self.scalar else scale


def _bitsandbytes(state: Mapping[str, Any]) -> dict[str, QuantSpec]:
    specs = {}
    for key, part in state.items():
        module, found, kind = key.partition(f".weight.{STATE}")
        if not found:
            continue
        if kind != "nf4":
            raise ModelError(
                f"the checkpoint stores {module} in bitsandbytes' {kind}, which is not read",
                where=_KEY,
                fix="use the original weights, or a checkpoint in NF4",
            )
        try:
            meta = json.loads(bytes(part[...].tolist()))
            specs[module] = QuantSpec.parse(f"nf4:block{int(meta['blocksize'])}" + "+dq" * ("nested_offset" in meta))
        except (ValueError, KeyError, TypeError):
            raise ModelError(f"the quant state of {module} is damaged", where=_KEY, fix="fetch it again") from None
    if not specs:
        raise ModelError(
            "this bitsandbytes checkpoint is not in NF4 (LLM.int8 is not read)",
            where=_KEY,
            fix="use the original weights with `quant.recipe: int8-weight-only`",
        )
    return specs


def _compressed_spec(settings: Mapping[str, Any]) -> QuantSpec:
    _, weights = _group(settings)
    bits, kind, strategy = weights.get("num_bits"), weights.get("type"), weights.get("strategy")
    element = {(8, "int"): "int8", (4, "int"): "int4", (8, "float"): "e4m3"}.get((bits, kind))  # type: ignore[arg-type]
    size = weights.get("group_size")
    block = weights.get("block_structure")
    gran = {"channel": "row", "tensor": "tensor", "group": f"group{size}"}.get(str(strategy))
    if strategy == "block" and isinstance(block, (list, tuple)) and len(block) == 2:
        gran = f"{block[0]}x{block[1]}"
    if element is None or gran is None or not weights.get("symmetric", True) or weights.get("actorder"):
        raise ModelError(
            f"this compressed-tensors checkpoint stores weights in a way that is not read ({json.dumps(weights)})",
            where=_KEY,
            fix="symmetric int8, int4 and fp8 are; or use the original weights",
        )
    return QuantSpec.parse(f"{element}:{gran}")


def _compressed_inputs(settings: Mapping[str, Any]) -> QuantSpec | None:
    group, _ = _group(settings)
    asked = group.get("input_activations")
    if not asked:
        return None
    element = {(8, "int"): "int8", (8, "float"): "e4m3"}.get((asked.get("num_bits"), asked.get("type")))
    if element is None or asked.get("strategy") != "token" or not asked.get("dynamic"):
        raise ModelError(
            f"inputs quantised like this are not built: {json.dumps(asked)}",
            where=_KEY,
            fix="8 bits per token with dynamic scales is; or use the original weights",
        )
    return QuantSpec.parse(f"{element}:row")


def _group(settings: Mapping[str, Any]) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    groups = list((settings.get("config_groups") or {}).values())
    if len(groups) != 1 or not groups[0].get("weights"):
        raise ModelError(
            f"a compressed-tensors checkpoint of {len(groups)} config groups is not read",
            where=_KEY,
            fix="one group is",
        )
    return groups[0], groups[0]["weights"]
