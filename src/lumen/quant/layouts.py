"""How a quantised weight lies in a state dict and on the disk: one documented key layout per format.

In memory a weight is its codes and named scales, whatever the format (formats.codec).  On the disk it wears the names
that the world already reads, so that a file written here loads elsewhere and back, bit for bit:

    nf4            bitsandbytes           weight [N·K/2, 1] uint8, weight.absmax, weight.quant_map,
                                          weight.nested_absmax, weight.nested_quant_map,
                                          weight.quant_state.bitsandbytes__nf4 (JSON as bytes)
    int4 per group compressed-tensors     weight_packed [N, K/8] int32, weight_scale [N, K/group], weight_shape [2]
    int8, fp8      compressed-tensors     weight [N, K], weight_scale
    the rest       ours                   weight, weight_scale and what else the format needs

bitsandbytes' JSON holds block size, shape, dtype and the mean of the absmax values, so these files explain themselves;
the others need the spec, which a directory written by `models.save_codes` keeps in its config.json.

compressed-tensors packs eight 4-bit codes q + 8 into an int32, code i at bits 4i: on a little-endian machine these are
our bytes (low nibble first), rows padded to whole words.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from lumen.core import QuantError
from lumen.formats import QuantSpec
from lumen.formats.codec import scale_names
from lumen.formats.lookup import NESTED_BLOCK, NF4, dynamic8_table
from lumen.formats.packing import packed_size

Parts = tuple[torch.Tensor, ...]
"""Codes, then scales in the order of `formats.codec.scale_names`."""

STATE = "quant_state.bitsandbytes__"
SUFFIXES = frozenset({"", "_packed", "_shape", "_scale", "_nested_scale", "_nested_offset", "_codebook"})
"""What may follow a weight's name, besides bitsandbytes' suffixes, which begin with a dot."""

_DTYPES = {str(d).removeprefix("torch."): d for d in (torch.float32, torch.bfloat16, torch.float16)}


@dataclass(frozen=True)
class Stored:
    """What the keys of one weight say.  spec, dtype: None where the keys do not tell."""

    parts: Parts
    spec: QuantSpec
    shape: tuple[int, ...] | None
    dtype: torch.dtype | None = None


def to_disk(parts: Parts, spec: QuantSpec, shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Suffix (`""`, `_scale`, `.absmax`, …; to append to `weight`) → tensor.

    shape [..., N, K] and dtype are those of the weight that was quantised.
    """
    if spec.element == "nf4":
        return _to_bitsandbytes(parts, spec, shape, dtype)
    if _packs_words(spec):
        return {
            "_packed": _words(parts[0]),
            "_scale": parts[1],
            "_shape": torch.tensor(shape, dtype=torch.int64, device=parts[0].device),
        }
    return {"": parts[0], **{f"_{name}": part for name, part in zip(scale_names(spec), parts[1:], strict=True)}}


def is_quantised(found: Mapping[str, torch.Tensor]) -> bool:
    """Whether the keys of one weight (by suffix) hold codes."""
    if "_packed" in found or any(STATE in suffix for suffix in found):
        return True
    return "" in found and found[""].dtype.itemsize == 1


def from_disk(found: Mapping[str, torch.Tensor], spec: QuantSpec | None, where: str = "") -> Stored:
    """The inverse of `to_disk`: `found` is suffix → tensor for one weight that `is_quantised`.

    spec: what the layer expects; None where only the file can tell (bitsandbytes' keys do).
    Raises QuantError where keys are missing, or the file holds another format than `spec`.
    """
    if any(STATE in suffix for suffix in found):
        stored = _from_bitsandbytes(found, where)
        if spec is not None and stored.spec != spec:
            raise QuantError(
                f"the file holds {stored.spec}, but this layer is {spec}",
                where=where,
                fix=f"quantise with `weight: {stored.spec}`, or load the original weights",
            )
        return stored
    if spec is None:
        raise QuantError(
            "these codes do not say what format they are",
            where=where,
            fix="quantise with the recipe they were saved in",
        )
    if "_packed" in found:
        _need(found, ("_packed", "_scale"), where)
        shape = tuple(found["_shape"].tolist()) if "_shape" in found else None
        read = _bytes if spec.element == "int8" else _nibbles
        return Stored((read(found["_packed"], shape), found["_scale"]), spec, shape)
    names = ("", *(f"_{name}" for name in scale_names(spec)))
    _need(found, names, where)
    return Stored(tuple(found[name] for name in names), spec, None)


def _need(found: Mapping[str, torch.Tensor], names: tuple[str, ...], where: str) -> None:
    missing = [f"weight{name}" for name in names if name not in found]
    if missing:
        raise QuantError(
            f"the state dict holds codes, but not {', '.join(missing)}",
            where=where,
            fix="load all shards of the checkpoint, with the recipe that it was saved in",
        )


# -- bitsandbytes -----------------------------------------------------------------------------------------------------


def _to_bitsandbytes(
    parts: Parts, spec: QuantSpec, shape: tuple[int, ...], dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    device = parts[0].device
    meta = {
        "quant_type": "nf4",
        "blocksize": spec.granularity.cols,
        "dtype": str(dtype).removeprefix("torch."),
        "shape": list(shape),
    }
    keys = {
        "": parts[0].reshape(-1, 1),
        ".absmax": parts[1],
        ".quant_map": torch.tensor(NF4, dtype=torch.float32, device=device),
    }
    if spec.double_quant:
        offset = 0.0 if parts[3].is_meta else float(parts[3])
        meta |= {"nested_blocksize": NESTED_BLOCK, "nested_dtype": "float32", "nested_offset": offset}
        keys[".nested_absmax"] = parts[2]
        keys[".nested_quant_map"] = torch.tensor(dynamic8_table(), device=device)
    text = json.dumps(meta).encode("utf-8")
    keys[f".{STATE}nf4"] = torch.tensor(list(text), dtype=torch.uint8, device=device)
    return keys


def _from_bitsandbytes(found: Mapping[str, torch.Tensor], where: str) -> Stored:
    (state_key,) = (suffix for suffix in found if STATE in suffix)
    kind = state_key.rpartition(STATE)[2]
    if kind != "nf4":
        raise QuantError(
            f"bitsandbytes' format {kind} is not read", where=where, fix="nf4 is; or load the original weights"
        )
    try:
        meta = json.loads(bytes(found[state_key].cpu().tolist()))
        size, shape = int(meta["blocksize"]), tuple(int(n) for n in meta["shape"])
    except (ValueError, KeyError, TypeError):
        raise QuantError("the quant state is damaged", where=where, fix="fetch the file again") from None
    nested = "nested_offset" in meta
    _need(found, ("", ".absmax", ".quant_map", *((".nested_absmax", ".nested_quant_map") if nested else ())), where)
    _same(found[".quant_map"], NF4, "quant_map", where)
    codes, absmax = found[""].reshape(-1), found[".absmax"]
    spec = QuantSpec.parse(f"nf4:block{size}" + ("+dq" if nested else ""))
    dtype = _DTYPES.get(str(meta.get("dtype")))
    if not nested:
        return Stored((codes, absmax.float()), spec, shape, dtype)
    _same(found[".nested_quant_map"], dynamic8_table(), "nested_quant_map", where)
    if meta.get("nested_blocksize") != NESTED_BLOCK:
        raise QuantError(
            f"the absmax values are nested in blocks of {meta.get('nested_blocksize')}, not {NESTED_BLOCK}", where=where
        )
    offset = torch.tensor(float(meta["nested_offset"]), dtype=torch.float32, device=codes.device)
    return Stored((codes, absmax, found[".nested_absmax"].float(), offset), spec, shape, dtype)


def _same(table: torch.Tensor, expected: tuple[float, ...], name: str, where: str) -> None:
    if not torch.equal(table.float().cpu(), torch.tensor(expected)):
        raise QuantError(f"the file's {name} is not bitsandbytes' own", where=where, fix="load the original weights")


# -- compressed-tensors -----------------------------------------------------------------------------------------------


def _packs_words(spec: QuantSpec) -> bool:
    return spec.element == "int4" and spec.granularity.kind in ("row", "group") and spec.transform == "none"


def _words(codes: torch.Tensor) -> torch.Tensor:
    """uint8 [..., bytes] → int32 [..., ceil(bytes / 4)]."""
    return F.pad(codes, (0, -codes.shape[-1] % 4)).contiguous().view(torch.int32)


def _nibbles(words: torch.Tensor, shape: tuple[int, ...] | None) -> torch.Tensor:
    """The inverse; the padding of a row goes where `shape` says how long it is."""
    codes = words.contiguous().view(torch.uint8)
    return codes if shape is None else codes[..., : packed_size(shape[-1], 4)].contiguous()


def _bytes(words: torch.Tensor, shape: tuple[int, ...] | None) -> torch.Tensor:
    """8-bit codes of W8A16, four to a word and plus 128 → int8 codes."""
    codes = (words.contiguous().view(torch.uint8).to(torch.int16) - 128).to(torch.int8)
    return codes if shape is None else codes[..., : shape[-1]].contiguous()
