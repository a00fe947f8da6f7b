"""Formats whose codes are indices into a table of values in [-1, 1]: NF4, the dynamic maps, learned codebooks.

    code = index of the table's value nearest to x / absmax          x ≈ table[code] · absmax

Blocks run over the flattened tensor, as bitsandbytes cuts it; their absmax is fp32, and 0 for a block of zeros.

**NF4** (QLoRA, arXiv 2305.14314) puts its 16 values at quantiles of a normal distribution scaled to [-1, 1], so that
Gaussian weights use all codes about equally often, with an exact zero.  Two codes to a byte, high nibble first.
`+dq` quantises the absmax values too: minus their mean, in the dynamic 8-bit map, blocks of 256; 4.127 bits per
parameter instead of 4.5.

**dynamic8** spends its bits where an optimizer's moments lie, over seven decades: for i = 0…6 the midpoints of 2^i
equal parts of [0.1, 1] times 10^(i - 6), both signs, and 0 and 1.  The unsigned map is for second moments.
**dynamic4** is the signed 4-bit map of 4-bit Adam (arXiv 2309.01507); its second moment uses 1/16 … 1, without a zero,
so that a square root never divides by zero.

**codebook** learns its 16 values from the tensor (formats.codebook).
"""

from __future__ import annotations

import torch

from lumen.formats.base import Codec, Request, Scales, Shape
from lumen.formats.codebook import learn_codebook
from lumen.formats.groups import flat_blocks
from lumen.formats.packing import pack, unpack
from lumen.formats.scales import check_finite
from lumen.formats.spec import QuantSpec

NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
NESTED_BLOCK = 256
CHUNK = 1 << 20
"""Values that NF4 handles at once: indices take eight bytes each, so a large weight needs many times itself."""


def _dynamic8(signed: bool) -> tuple[float, ...]:
    values: list[float] = []
    for i in range(7):
        ends = torch.linspace(0.1, 1, (2**i if signed else 2 ** (i + 1)) + 1)
        middles = (10 ** (i - 6)) * ((ends[:-1] + ends[1:]) / 2.0)
        values += middles.tolist()
        if signed:
            values += (-middles).tolist()
    if not signed:
        # 2 + 4 + … + 128 = 254 values, with 0 and 1
        assert len(values) == 254
    return tuple(sorted([*values, 0.0, 1.0]))


_DYNAMIC8 = {signed: _dynamic8(signed) for signed in (True, False)}  # made here: a compiler cannot trace the making


def dynamic8_table(signed: bool = True) -> tuple[float, ...]:
    """256 values of the dynamic 8-bit map, ascending."""
    return _DYNAMIC8[signed]


_FIRST = (0.0055, 0.0325, 0.0775, 0.2125, 0.4375, 0.6625, 0.8875)


def dynamic4_table(signed: bool = True) -> tuple[float, ...]:
    """16 values of 4-bit Adam: the first moment's signed map, or the second moment's, which has no zero."""
    if signed:
        return tuple(sorted([*(-v for v in _FIRST), 0.0, *_FIRST, 1.0]))
    return tuple(torch.linspace(0, 1, 17)[1:].tolist())


def table_of(spec: QuantSpec) -> tuple[float, ...]:
    """The fixed table of a format."""
    return {"nf4": NF4, "dynamic8": dynamic8_table(), "dynamic4": dynamic4_table()}[spec.element]


def nearest(units: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Index of the nearest entry of an ascending table; a tie goes to the lower."""
    return torch.bucketize(units.contiguous(), (table[1:] + table[:-1]) / 2)


def stochastic(units: torch.Tensor, table: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Index of one of the two neighbours, the upper with probability (x - lo)/(hi - lo)."""
    units = units.clamp(table[0], table[-1])
    low = (torch.bucketize(units.contiguous(), table, right=True) - 1).clamp(0, table.numel() - 2)
    part = (units - table[low]) / (table[low + 1] - table[low])
    return low + (uniform < part).long()


def to_table(
    blocks: torch.Tensor, absmax: torch.Tensor, table: torch.Tensor, uniform: torch.Tensor | None = None
) -> torch.Tensor:
    """blocks [B, S] and absmax [B], both fp32 → indices [B, S].

    Times the reciprocal of at least 1e-38, as bitsandbytes does: that of a smaller number would be infinite.
    """
    units = blocks * (1 / absmax.clamp_min(1e-38))[:, None]
    return nearest(units, table) if uniform is None else stochastic(units, table, uniform)


def _encode(x: torch.Tensor, spec: QuantSpec, ask: Request) -> tuple[torch.Tensor, Scales]:
    size = spec.granularity.cols
    if _in_chunks(x, spec):
        step = CHUNK // (2 * size) * 2 * size  # whole blocks and whole bytes
        pieces = [_encode_flat(part, spec, ask) for part in x.detach().reshape(-1).split(step)]
        codes = torch.cat([piece for piece, _ in pieces])
        scales: Scales = {"scale": torch.cat([piece["scale"] for _, piece in pieces])}
    else:
        codes, scales = _encode_flat(x, spec, ask)
    return codes, nest(scales["scale"]) if spec.double_quant else scales


def _in_chunks(x: torch.Tensor, spec: QuantSpec) -> bool:
    large = spec.element == "nf4" and x.numel() > CHUNK and spec.granularity.cols <= CHUNK // 2
    return large and not torch.compiler.is_compiling()


def _encode_flat(x: torch.Tensor, spec: QuantSpec, ask: Request) -> tuple[torch.Tensor, Scales]:
    """Codes and the absmax of every block."""
    blocks = flat_blocks(x.float(), spec.granularity.cols)
    absmax = blocks.abs().amax(1) if x.numel() else blocks.new_zeros(0)
    check_finite(absmax, ask.nonfinite, ask.name)
    absmax = torch.where(torch.isfinite(absmax), absmax, torch.nan)
    scales: Scales = {"scale": absmax}
    if spec.element == "codebook":
        units = blocks * (1 / absmax.clamp_min(1e-38))[:, None]
        table = learn_codebook(units, absmax, ask.importance)
        scales["codebook"] = table
    else:
        table = torch.tensor(table_of(spec), device=x.device)
    uniform = None if ask.noise is None else ask.noise.uniform(blocks.shape, x.device)
    count = x.numel()
    if spec.format.bits == 4:
        count += count % 2  # the last byte's spare nibble holds the code of 0, as bitsandbytes writes it
    codes = to_table(blocks, absmax, table, uniform).to(torch.uint8).reshape(-1)[:count]
    if spec.format.bits == 4:
        codes = pack(codes, 4, high_first=True)
    return codes, scales


def decode_nf4(
    codes: torch.Tensor, scales: Scales, spec: QuantSpec, shape: Shape, dtype: torch.dtype
) -> torch.Tensor | None:
    """A large NF4 weight [shape] in `dtype`, chunk by chunk, one look-up per byte; None where it is not whole blocks.

    The arithmetic is `decode`'s: table[code] · absmax in fp32, rounded once.
    """
    count, size = torch.Size(shape).numel(), spec.granularity.cols
    if spec.element != "nf4" or count % size or size % 2 or count <= CHUNK or torch.compiler.is_compiling():
        return None
    absmax = unnest(scales) if spec.double_quant else scales["scale"].float()
    table = torch.tensor(NF4, device=codes.device)
    pairs = torch.stack([table.repeat_interleave(16), table.repeat(16)], dim=1)  # high nibble first
    result = torch.empty(count, dtype=dtype, device=codes.device)
    flat, num_blocks = codes.reshape(-1), count // size
    step = max(1, CHUNK // size)
    for start in range(0, num_blocks, step):
        end = min(start + step, num_blocks)
        values = pairs.index_select(0, flat[start * size // 2 : end * size // 2].int()).reshape(-1, size)
        result[start * size : end * size] = values.mul_(absmax[start:end, None]).reshape(-1)
    return result.reshape(shape)


def _decode(codes: torch.Tensor, scales: Scales, spec: QuantSpec, shape: Shape) -> torch.Tensor:
    count = torch.Size(shape).numel()
    codes = codes.reshape(-1)
    if spec.format.bits == 4:
        codes = unpack(codes, 4, count, high_first=True)
    absmax = unnest(scales) if spec.double_quant else scales["scale"].float()
    table = scales.get("codebook")
    if table is None:
        table = torch.tensor(table_of(spec), device=codes.device)
    blocks = flat_blocks(table[codes.long()], spec.granularity.cols)
    return (blocks * absmax[:, None]).reshape(-1)[:count].reshape(shape)


def nest(absmax: torch.Tensor) -> Scales:
    """Quantise absmax [blocks] as QLoRA does: codes of absmax - mean, an absmax per 256 of them, and the mean.

    A block marked with NaN marks the 256 that it shares an absmax with, as these codes have no NaN, but not the mean.
    """
    offset = absmax.mean() if absmax.numel() else absmax.new_zeros(())
    offset = torch.where(torch.isfinite(offset), offset, absmax.nanmean().nan_to_num()) if absmax.numel() else offset
    blocks = flat_blocks(absmax - offset, NESTED_BLOCK)
    outer = blocks.abs().amax(1) if absmax.numel() else absmax.new_zeros(0)
    table = torch.tensor(dynamic8_table(), device=absmax.device)
    codes = to_table(blocks, outer, table).to(torch.uint8).reshape(-1)[: absmax.numel()]
    return {"scale": codes, "nested_scale": outer, "nested_offset": offset}


def unnest(scales: Scales) -> torch.Tensor:
    """absmax [blocks] fp32."""
    codes = scales["scale"]
    table = torch.tensor(dynamic8_table(), device=codes.device)
    blocks = flat_blocks(table[codes.long()], NESTED_BLOCK) * scales["nested_scale"][:, None]
    return blocks.reshape(-1)[: codes.numel()] + scales["nested_offset"]


def _names(spec: QuantSpec) -> tuple[str, ...]:
    if spec.double_quant:
        return ("scale", "nested_scale", "nested_offset")
    return ("scale", "codebook") if spec.element == "codebook" else ("scale",)


LOOKUP = Codec(_encode, _decode, _names, overhead=lambda spec: 8.0 + 32.0 / NESTED_BLOCK if spec.double_quant else 32.0)
