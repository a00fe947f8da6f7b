"""Against bitsandbytes: NF4 with and without double quantisation, the dynamic 8-bit maps, fp4.

Codes are compared with the operator's definition in torch (its `default` implementation, from which the GPU kernels do
not differ).  Its fp32 CPU kernel for the dynamic map looks values up on a coarse grid: near a midpoint between two
codes it may take either, so there only what matters is compared: its code is never nearer to the value than ours.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from lumen.bench.numerics.equality import Comparison, differing, hard, quiet, total
from lumen.bench.numerics.figures import bnb_fp4
from lumen.bench.numerics.measure import gaussian
from lumen.formats import QuantSpec, decode, encode
from lumen.formats.lookup import NF4, dynamic8_table

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def comparisons() -> Iterator[Comparison]:
    def line(name: str, run: Any) -> Comparison:
        return Comparison("bitsandbytes", name, run)

    yield line("nf4: the 16 values", _nf4_table)
    for block in (32, 64, 128, 256, 4096):
        yield line(f"nf4:block{block}: codes, absmax, decodes", partial(_nf4, block, torch.float32))
    for name in ("bf16", "fp16"):
        yield line(f"nf4 of {name}: codes, absmax, decodes", partial(_nf4, 64, _DTYPES[name]))
    yield line("nf4: odd sizes, short last block", _nf4_odd)
    yield line("nf4+dq: codes, mean, nested absmax, nested codes", _double)
    yield line("nf4+dq: decodes, theirs by us and ours by them", _double_decodes)
    yield line("dynamic8: signed and unsigned map", _maps)
    for name, dtype in _DTYPES.items():
        yield line(f"dynamic8 of {name}: codes, absmax, decodes", partial(_dynamic8, dtype))
    yield line("dynamic8: values where their fp32 CPU kernel is nearer", _dynamic8_native)
    yield line("fp4: values after a round trip", _fp4)


def _bnb() -> Any:
    with quiet():
        import bitsandbytes.functional as functional
    return functional


def _default(op: str, *arguments: Any) -> Any:
    """An operator's definition in torch, passing by what the device would choose."""
    _bnb()
    overload = getattr(torch.ops.bitsandbytes, op).default
    with torch.compiler.set_stance("force_eager"):  # its decoder compiles itself, once per shape
        return overload._op_dk(torch._C.DispatchKey.CompositeExplicitAutograd, *arguments)


def _nf4_table() -> tuple[int, int]:
    return differing(torch.tensor(NF4), _bnb().get_4bit_type("nf4", device="cpu").float())


def _values(dtype: torch.dtype) -> torch.Tensor:
    """The hard values, within the dtype's range."""
    return hard().clamp(-6e4, 6e4).to(dtype) if dtype == torch.float16 else hard().to(dtype)


def _nf4(block: int, dtype: torch.dtype, x: torch.Tensor | None = None) -> tuple[int, int]:
    x = _values(dtype) if x is None else x
    spec = QuantSpec.parse(f"nf4:block{block}")
    codes, scales = encode(x, spec)
    packed, state = _bnb().quantize_4bit(x, blocksize=block, quant_type="nf4", compress_statistics=False)
    absmax = state.absmax.reshape(-1).float()
    ours = _default("dequantize_4bit", codes.reshape(-1, 1), scales["scale"], block, "nf4", x.shape, dtype)
    theirs = decode(packed.reshape(-1), {"scale": absmax}, spec, x.shape, dtype)
    want = _default("dequantize_4bit", packed, absmax, block, "nf4", x.shape, dtype)
    return total(
        differing(codes, packed.reshape(-1)),
        differing(scales["scale"], absmax),
        differing(ours, decode(codes, scales, spec, x.shape, dtype)),
        differing(theirs, want),
    )


def _nf4_odd() -> tuple[int, int]:
    # without rows of zeros: a short last block of zeros has absmax 1e-38 there and 0 here
    x = gaussian(1, 4000)
    shapes = [(1, 1), (3, 1), (1, 63), (1, 65), (5, 77), (31, 129)]
    return total(*(_nf4(64, torch.float32, x[0, : a * b].reshape(a, b)) for a, b in shapes if a * b <= 4000))


def _double() -> tuple[int, int]:
    parts = []
    for x in (hard(), gaussian(64, 1024), gaussian(100, 77)):
        packed, state = _bnb().quantize_4bit(x, blocksize=64, quant_type="nf4", compress_statistics=True)
        codes, scales = encode(x, QuantSpec.parse("nf4+dq"))
        absmax = encode(x, QuantSpec.parse("nf4"))[1]["scale"]
        nested, outer = _default("quantize_blockwise", absmax - state.offset, state.state2.code, 256)
        parts += [
            differing(codes, packed.reshape(-1)),
            differing(scales["nested_offset"], state.offset),
            differing(scales["nested_scale"], outer),
            differing(scales["scale"], nested),
        ]
    return total(*parts)


def _double_decodes() -> tuple[int, int]:
    parts = []
    for x in (hard(), gaussian(64, 1024)):
        spec = QuantSpec.parse("nf4+dq")
        packed, state = _bnb().quantize_4bit(x, blocksize=64, quant_type="nf4", compress_statistics=True)
        theirs = {"scale": state.absmax.reshape(-1), "nested_scale": state.state2.absmax, "nested_offset": state.offset}
        parts.append(
            differing(decode(packed.reshape(-1), theirs, spec, x.shape), _bnb().dequantize_4bit(packed, state))
        )
        codes, scales = encode(x, spec)
        state.absmax, state.state2.absmax = scales["scale"], scales["nested_scale"]
        state.offset = scales["nested_offset"]
        ours = _bnb().dequantize_4bit(codes.reshape(-1, 1), state)
        parts.append(differing(decode(codes, scales, spec, x.shape), ours))
    return total(*parts)


def _maps() -> tuple[int, int]:
    create = _bnb().create_dynamic_map
    return total(
        differing(torch.tensor(dynamic8_table()), create(signed=True)),
        differing(torch.tensor(dynamic8_table(signed=False)), create(signed=False)),
    )


def _dynamic8(dtype: torch.dtype) -> tuple[int, int]:
    x, spec, table = _values(dtype), QuantSpec.parse("dynamic8"), _bnb().create_dynamic_map(signed=True)
    codes, scales = encode(x, spec)
    theirs, absmax = _default("quantize_blockwise", x, table, 256)
    ours = _bnb().dequantize_blockwise(codes.reshape(x.shape), absmax=scales["scale"], code=table, blocksize=256)
    return total(
        differing(codes.reshape(x.shape), theirs),
        differing(scales["scale"], absmax),
        differing(decode(codes, scales, spec, x.shape), ours.float()),
        differing(
            decode(theirs.reshape(-1), {"scale": absmax}, spec, x.shape),
            _bnb().dequantize_blockwise(theirs, absmax=absmax, code=table, blocksize=256),
        ),
    )


def _dynamic8_native() -> tuple[int, int]:
    x, spec, table = gaussian(256, 1024), QuantSpec.parse("dynamic8"), _bnb().create_dynamic_map(signed=True)
    theirs, absmax = torch.ops.bitsandbytes.quantize_blockwise(x, table, 256)
    codes, scales = encode(x, spec)
    a = decode(codes, scales, spec, x.shape).double()
    b = decode(theirs.reshape(-1), {"scale": absmax}, spec, x.shape).double()
    nearer = (b - x).abs() < (a - x).abs() - 1e-6 * absmax.repeat_interleave(256).reshape(x.shape)
    return int(nearer.sum()), x.numel()


def _fp4() -> tuple[int, int]:
    x, parts = gaussian(64, 1024), []
    for block in (64, 128, 256):
        packed, state = _bnb().quantize_4bit(x, blocksize=block, quant_type="fp4", compress_statistics=False)
        parts.append(differing(bnb_fp4(x, block), _bnb().dequantize_4bit(packed, state)))
    return total(*parts)
