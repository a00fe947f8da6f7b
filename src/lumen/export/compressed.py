"""compressed-tensors: the layout in which vLLM and transformers load quantised weights.

    scheme       weights                   activations               format            tensors beside a Linear [N, K]
    fp8          e4m3, a scale per row     e4m3, per token, dynamic  float-quantized   weight e4m3, weight_scale [N, 1]
    fp8-static   e4m3, a scale per row     e4m3, one scale, static   float-quantized   … and input_scale [1]
    int8         int8, a scale per row     int8, per token, dynamic  int-quantized     weight int8, weight_scale [N, 1]
    w8a16        int8, a scale per row     16 bits                   pack-quantized    weight_packed int32 [N, K/4] …
    int4         int4, a scale per group   16 bits                   pack-quantized    weight_packed int32 [N, K/8],
                                                                     weight_scale [N, K/g], weight_shape int64 [2]

The codes are those of `lumen.formats` (symmetric, amax on the largest code), FP8 always OCP: vLLM converts to FNUZ on
an MI300 itself.  Scales are stored in the model's dtype and rounded to it *before* the codes are computed, so
code · scale is exact in fp32 and every reader that rounds the product once gets the same weight.  Packed words hold
the codes plus 2^(bits-1), the first code in the lowest bits.

Embeddings, norms, biases, the output head and routers keep the model's dtype.  Experts, which lie one by one on the
disk, are quantised like any other linear layer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from lumen.core import ConfigError, QuantError, note
from lumen.core.files import atomic_write_json
from lumen.export.stage import INDEX, Staged
from lumen.formats import QuantSpec, decode, encode
from lumen.formats.packing import pack
from lumen.models.load import quiet_progress
from lumen.quant.modules import linear_layers

_EXPERT = re.compile(r"\.experts\.\d+\.\w+$")
_HEADS = ("lm_head",)
GROUPS = (128, 64, 32)


@dataclass(frozen=True)
class Scheme:
    """spec: of the weights.  bits: of a packed code, 0 where codes are stored plainly.  activations: config entry."""

    spec: str
    format: str
    weights: dict[str, Any]
    activations: dict[str, Any] | None = None
    bits: int = 0

    @property
    def static(self) -> bool:
        return self.activations is not None and not self.activations["dynamic"]


def _args(bits: int, kind: str, strategy: str, dynamic: bool = False) -> dict[str, Any]:
    return {"num_bits": bits, "type": kind, "symmetric": True, "strategy": strategy, "dynamic": dynamic}


SCHEMES = {
    "fp8": Scheme("e4m3:row", "float-quantized", _args(8, "float", "channel"), _args(8, "float", "token", True)),
    "fp8-static": Scheme("e4m3:row", "float-quantized", _args(8, "float", "channel"), _args(8, "float", "tensor")),
    "int8": Scheme("int8:row", "int-quantized", _args(8, "int", "channel"), _args(8, "int", "token", True)),
    "w8a16": Scheme("int8:row", "pack-quantized", _args(8, "int", "channel"), bits=8),
    "int4": Scheme("int4", "pack-quantized", _args(4, "int", "group"), bits=4),
}
"""export_format → scheme."""


@dataclass
class Written:
    """quantised, kept: names of modules.  bytes: of all weight files.  group_size: of int4, else None."""

    quantised: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    bytes: int = 0
    group_size: int | None = None


def write_compressed(
    staged: Staged,
    folder: Path,
    name: str,
    *,
    group_size: int | None = None,
    max_shard: float = 5e9,
    input_scales: dict[str, float] | None = None,
    allow_remote_code: bool = False,
) -> Written:
    """Write weights, index and config.json of scheme `name` into `folder`; one shard is in memory at a time.

    group_size:   of int4; None chooses.   max_shard: bytes.
    input_scales: module name → scale of its input, for fp8-static.
    Raises ConfigError and QuantError.
    """
    scheme = SCHEMES[name]
    layers, kept = _layers(staged, allow_remote_code)
    if scheme.weights["strategy"] == "group":
        group_size = _group_size(staged, layers, group_size)
        layers, uneven = _split(layers, lambda n: staged.weights.shapes[f"{n}.weight"][-1] % (group_size or 1) == 0)
        kept += uneven
    elif scheme.bits:
        per = 32 // scheme.bits
        layers, uneven = _split(layers, lambda n: staged.weights.shapes[f"{n}.weight"][-1] % per == 0)
        kept += uneven
    else:
        uneven = []
    if uneven:
        note(f"{len(uneven)} layers whose rows are no multiple of a group stay in {staged.dtype}: {uneven[0]} …")
    if not layers:
        raise QuantError(f"{name} quantises no layer of this model", where=staged.source)
    result = Written(sorted(layers), kept, 0, group_size)
    result.bytes = _shards(_tensors(staged, set(layers), scheme, group_size, input_scales), folder, max_shard)
    weights = scheme.weights | ({"group_size": group_size} if group_size else {})
    group = {
        "targets": ["Linear"], "weights": weights, "input_activations": scheme.activations,
        "output_activations": None,
    }  # fmt: skip
    quantization = {
        "quant_method": "compressed-tensors", "format": scheme.format, "quantization_status": "compressed",
        "ignore": kept or list(_HEADS), "config_groups": {"group_0": group},
    }  # fmt: skip
    config = dict(staged.config)
    config.pop("torch_dtype", None)
    config |= {"dtype": str(staged.dtype).removeprefix("torch."), "quantization_config": quantization}
    atomic_write_json(folder / "config.json", config)
    return result


def _split(names: list[str], keep: Any) -> tuple[list[str], list[str]]:
    return [n for n in names if keep(n)], [n for n in names if not keep(n)]


def _layers(staged: Staged, allow_remote_code: bool) -> tuple[list[str], list[str]]:
    """Modules on the disk to quantise, and linear ones to leave (heads, routers)."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with quiet_progress(), torch.device("meta"):
        settings = AutoConfig.from_pretrained(staged.folder, local_files_only=True, trust_remote_code=allow_remote_code)
        model = AutoModelForCausalLM.from_config(settings, trust_remote_code=allow_remote_code)
    # stacked experts lie on the disk one by one, under the names that _EXPERT finds
    found = {layer.name: bool(layer.protected) for layer in linear_layers(model) if layer.parameter == "weight"}
    on_disk = {n.removesuffix(".weight") for n in staged.weights.files if n.endswith(".weight")}
    layers = [n for n in sorted(on_disk) if found.get(n) is False or (n not in found and _EXPERT.search(n))]
    kept = sorted(n for n, protected in found.items() if protected)
    kept += sorted(n for n in on_disk if n not in found and re.search(r"\.(gate|router)$", n))
    missing = [n for n, protected in found.items() if not protected and n not in on_disk]
    if missing:
        raise QuantError(
            f"{len(missing)} linear layers have another name on the disk, such as {missing[0]}",
            where=str(staged.folder),
            fix="export to hf first and quantise that directory; if this fails too, report the architecture",
        )
    return layers, kept


def _group_size(staged: Staged, layers: list[str], wanted: int | None) -> int:
    widths = {staged.weights.shapes[f"{n}.weight"][-1] for n in layers}
    if wanted is None:
        return next((g for g in GROUPS if all(width % g == 0 for width in widths)), 32)
    if all(width % wanted for width in widths):
        raise ConfigError(
            f"groups of {wanted} divide no layer of this model (rows of {', '.join(map(str, sorted(widths)))} values)",
            where="export_group_size",
            fix="leave it out, or give a divisor",
        )
    return wanted


def _tensors(
    staged: Staged, layers: set[str], scheme: Scheme, group_size: int | None, input_scales: dict[str, float] | None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of the export, one source tensor at a time."""
    for name in staged.weights.names():
        tensor = staged.weights.get(name)
        module = name.removesuffix(".weight")
        if module not in layers or name == module:
            yield name, tensor.to(staged.dtype) if tensor.is_floating_point() else tensor
            continue
        yield from quantised(tensor, name, scheme, staged.dtype, group_size).items()
        if scheme.static:
            scale = (input_scales or {}).get(module)
            if scale is None:
                raise QuantError(
                    f"no activation of {module} was seen in calibration",
                    where=module,
                    fix="export fp8, which scales activations as they come; experts cannot be calibrated here",
                )
            yield f"{module}.input_scale", torch.tensor([scale], dtype=staged.dtype)


def quantised(
    tensor: torch.Tensor, name: str, scheme: Scheme, dtype: torch.dtype, group_size: int | None
) -> dict[str, torch.Tensor]:
    """The stored tensors of one weight [N, K]; `name` ends in `.weight`."""
    spec = QuantSpec.parse(f"{scheme.spec}:group{group_size}" if group_size else scheme.spec)
    codes, scales = encode(tensor, spec, scale_dtype=dtype, name=name)
    stored = {f"{name}_scale": scales["scale"]}
    if not scheme.bits:
        return {name: codes} | stored
    shifted = codes if scheme.bits == 4 else (codes.to(torch.int16) + 128).to(torch.uint8)
    words = pack(shifted, 8) if scheme.bits == 8 else shifted  # int4 codes are packed already, plus 8, low nibble first
    return {
        f"{name}_packed": words.contiguous().view(torch.int32),
        **stored,
        f"{name}_shape": torch.tensor(tensor.shape, dtype=torch.int64),
    }


def dequantised(
    tensor: torch.Tensor, name: str, scheme: Scheme, dtype: torch.dtype, group_size: int | None
) -> torch.Tensor:
    """The weight [N, K] that the stored tensors stand for, in `dtype`: what a reader must find."""
    spec = QuantSpec.parse(f"{scheme.spec}:group{group_size}" if group_size else scheme.spec)
    codes, scales = encode(tensor, spec, scale_dtype=dtype, name=name)
    return decode(codes, scales, spec, tensor.shape, dtype)


def _shards(tensors: Iterator[tuple[str, torch.Tensor]], folder: Path, limit: float) -> int:
    """Write safetensors of at most `limit` bytes each, with an index where there is more than one; returns bytes."""
    parts: list[dict[str, int]] = []
    pending: dict[str, torch.Tensor] = {}
    size = total = 0

    def flush() -> None:
        nonlocal pending, size, total
        save_file(pending, folder / f"part-{len(parts)}.safetensors", metadata={"format": "pt"})
        parts.append({name: tensor.nbytes for name, tensor in pending.items()})
        pending, size = {}, 0

    for name, tensor in tensors:
        if pending and size + tensor.nbytes > limit:
            flush()
        pending[name] = tensor.contiguous()
        size += tensor.nbytes
        total += tensor.nbytes
    flush()
    if len(parts) == 1:
        (folder / "part-0.safetensors").rename(folder / "model.safetensors")
        return total
    weight_map: dict[str, str] = {}
    for number, part in enumerate(parts):
        file = f"model-{number + 1:05d}-of-{len(parts):05d}.safetensors"
        (folder / f"part-{number}.safetensors").rename(folder / file)
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return total
