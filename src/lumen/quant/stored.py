"""The stored form of a quantised weight inside a module: a parameter of codes, buffers of scales, and its keys.

A weight `NAME` in codes is the parameter `NAME` (without gradient, so that FSDP2 shards it) and one buffer
`NAME_<scale>` per scale.  FP8 codes lie in it as bytes: gloo does not send torch's FP8 types, and whatever casts
"floating-point parameters" (`.to(bfloat16)`, FSDP2's mixed precision) would widen them.

state_dict wears the keys of quant.layouts instead, which others read; loading understands those, our
plain ones, and dense weights, which it quantises.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from lumen.core import QuantError
from lumen.formats import QuantSpec
from lumen.formats.codec import scale_names
from lumen.quant.layouts import SUFFIXES, Parts, Stored, from_disk, is_quantised, to_disk

_FLOAT8 = {
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
    "mxfp8_e4m3": torch.float8_e4m3fn,
    "mxfp8_e5m2": torch.float8_e5m2,
    "e4m3_expanded": torch.float8_e4m3fn,
}


def as_bytes(codes: torch.Tensor) -> torch.Tensor:
    """Codes as a parameter keeps them: FP8 as uint8, everything else as it is."""
    return codes.view(torch.uint8) if codes.is_floating_point() else codes


def as_codes(codes: torch.Tensor, spec: QuantSpec) -> torch.Tensor:
    """The inverse of `as_bytes`: codes of the type that the format's codec makes."""
    kind = _FLOAT8.get(spec.element)
    return codes.view(kind) if kind is not None and codes.dtype == torch.uint8 else codes


def put(module: nn.Module, name: str, parts: Parts, spec: QuantSpec) -> None:
    """Make `parts` the weight `name` of a module."""
    parts = tuple(_own(part) for part in parts)
    module._parameters[name] = nn.Parameter(as_bytes(parts[0]), requires_grad=False)
    for scale, part in zip(scale_names(spec), parts[1:], strict=True):
        buffer = f"{name}_{scale}"
        if buffer in module._buffers:
            module._buffers[buffer] = part
        else:
            module.register_buffer(buffer, part)


def _own(part: torch.Tensor) -> torch.Tensor:
    """Without the rest of a larger storage, which would stay in memory and which safetensors refuses to write."""
    whole = part.is_meta or hasattr(part, "placements") or part.untyped_storage().nbytes() == part.nbytes
    return part if whole else part.clone()


def parts_of(module: nn.Module, name: str, spec: QuantSpec) -> Parts:
    """The codes and scales of the weight `name`."""
    codes = module._parameters[name]
    assert codes is not None
    return (as_codes(codes, spec), *(module.get_buffer(f"{name}_{scale}") for scale in scale_names(spec)))


def plain_names(name: str, spec: QuantSpec) -> list[str]:
    """The keys of the weight `name` in memory."""
    return [name, *(f"{name}_{scale}" for scale in scale_names(spec))]


def rename_saved(
    destination: dict[str, Any],
    prefix: str,
    name: str,
    spec: QuantSpec,
    shape: tuple[int, ...],
    dtype: torch.dtype,
) -> None:
    """Replace a weight's keys in memory by its keys on the disk; a sharded weight keeps the former."""
    keys = [prefix + key for key in plain_names(name, spec)]
    if any(hasattr(destination[key], "placements") for key in keys):  # FSDP2's DTensors
        return
    codes, *scales = (destination.pop(key) for key in keys)
    parts = (as_codes(codes, spec), *scales)
    for suffix, tensor in to_disk(parts, spec, shape, dtype).items():
        destination[f"{prefix}{name}{suffix}"] = tensor


def found_keys(state_dict: dict[str, Any], prefix: str, name: str) -> dict[str, torch.Tensor]:
    """Suffix → tensor of everything that a state dict holds of the weight `name`."""
    start = prefix + name
    found = {k[len(start) :]: v for k, v in state_dict.items() if k.startswith(start)}
    return {suffix: v for suffix, v in found.items() if suffix in SUFFIXES or suffix.startswith(".")}


def load_keys(
    state_dict: dict[str, Any],
    prefix: str,
    name: str,
    spec: QuantSpec | None,
    *,
    codes: bool,
    shape: tuple[int, ...],
    encode: Callable[[torch.Tensor], Parts],
    decode: Callable[[Stored], torch.Tensor],
) -> None:
    """Turn whatever the state dict holds of the weight `name` into what the module keeps, in place.

    codes: whether it keeps codes of `spec`, or a dense weight.  encode, decode: between the two.
    Raises QuantError where codes are of another format, incomplete, or of another shape.
    """
    found = found_keys(state_dict, prefix, name)
    where = prefix + name
    if not found:
        return
    if not is_quantised(found):
        if codes and "" in found:
            assert spec is not None
            codes_, *scales = encode(found[""])
            _replace(state_dict, where, found, plain_names(where, spec), (as_bytes(codes_), *scales))
        return
    if spec is None and "" in found and found[""].dtype.itemsize == 1 and len(found) < 3:
        raise QuantError(
            f"the state dict holds {found[''].dtype} codes, but this layer keeps its weight in high precision",
            where=where,
            fix="quantise with the recipe that the state dict was saved with",
        )
    explained = any(".quant_state" in suffix for suffix in found)
    stored = from_disk(found, spec if codes or not explained else None, where)
    if stored.shape is not None and stored.shape != shape:
        raise QuantError(f"the weight in the file is {list(stored.shape)}, here it is {list(shape)}", where=where)
    first, *rest = stored.parts
    if not codes:
        stored = replace(stored, parts=(as_codes(first, stored.spec), *rest))
        _replace(state_dict, where, found, [where], (decode(stored),))
        return
    _replace(state_dict, where, found, plain_names(where, stored.spec), (as_bytes(first), *rest))


def _replace(
    state_dict: dict[str, Any], where: str, found: dict[str, torch.Tensor], names: list[str], tensors: Parts
) -> None:
    for suffix in found:
        del state_dict[where + suffix]
    state_dict.update(zip(names, tensors, strict=True))
