"""Every format against its definition written again, in plain Python and numpy scalars, on awkward tensors.

Nothing here shares code with lumen.formats: grids are listed by their bit fields, scales and codes come from loops over
groups.  What the definition says is computed in fp32 is computed with numpy's float32; the rest is exact (float64).
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from lumen.formats import QuantSpec, decode, encode
from lumen.formats.packing import unpack

f32 = np.float32
CASES = 16


def tensors(seed: int, rows_of_32: bool = False) -> Iterator[torch.Tensor]:
    """Odd shapes, all input types, views that are not contiguous, zeros, ties, signs, tiny, huge and mixed values."""
    rng = random.Random(seed)
    for case in range(CASES):
        shape = rng.choice([(1,), (7,), (33,), (1, 1), (3, 50), (5, 64), (2, 3, 35), (130, 3), (2, 160), (1, 257)])
        if rows_of_32:
            shape = (*shape[:-1], 32 * rng.randint(1, 3))
        values = torch.randn(shape, generator=torch.Generator().manual_seed(seed * 100 + case))
        kind = case % 8
        if kind == 1:
            values = (values * 4).round() / 2  # ties
        elif kind == 2:
            values = values * 10.0 ** rng.randint(-44, 36)
        elif kind == 3:
            values = values * torch.pow(10.0, torch.randint(-12, 12, shape).float())
        elif kind == 4:
            values = values * (torch.rand(shape) < 0.3)
        elif kind == 5:
            values = values.sign() * 2.0 ** rng.randint(-30, 30)
        elif kind == 6:
            values[..., :1] *= 1e4
        elif kind == 7:
            values = values * 2.0 ** rng.randint(-149, -124)  # around and below fp32's smallest normal number
        values = values.nan_to_num(posinf=3e38, neginf=-3e38)
        dtype = (torch.float32, torch.bfloat16, torch.float16)[case % 3]
        if dtype == torch.float16:
            values = values.clamp(-65504, 65504)
        x = values.to(dtype)
        if case % 4 == 1 and x.ndim > 1:
            x = x.transpose(-1, -2).contiguous().transpose(-1, -2)
        elif case % 4 == 2:
            x = torch.stack([x, x], -1)[..., 0]
        yield x


def groups(shape: tuple[int, ...], gran: str) -> list[list[int]]:
    """Flat indices of the values of each group, in the order of the scales."""
    numel = math.prod(shape)
    if gran == "tensor":
        return [list(range(numel))]
    rows, cols = (1, shape[0]) if len(shape) == 1 else shape[-2:]
    r, c = (1, cols) if gran == "row" else tuple(map(int, gran.split("x")))
    out = []
    for lead in range(numel // (rows * cols)):
        for i, j in itertools.product(range(0, rows, r), range(0, cols, c)):
            at = [(a, b) for a in range(i, min(i + r, rows)) for b in range(j, min(j + c, cols))]
            out.append([lead * rows * cols + a * cols + b for a, b in at])
    return out


def flat_groups(numel: int, size: int) -> list[list[int]]:
    return [list(range(i, min(i + size, numel))) for i in range(0, numel, size)]


def numbers(x: torch.Tensor) -> list[np.float32]:
    return [f32(v) for v in x.contiguous().float().reshape(-1).tolist()]


TINY = f32(2.0**-126)


def own_scale(amax: np.float32, largest: float, pow2: bool) -> np.float32:
    """amax / max in fp32, or the power of two above it; 1 for groups of zeros and below the smallest normal number."""
    scale = f32(amax / f32(largest))
    if pow2 and scale > 0:
        mantissa, exponent = math.frexp(float(scale))
        scale = f32(2.0 ** (exponent - 1 if mantissa == 0.5 else exponent))
    return f32(1) if scale < TINY else scale


@pytest.mark.parametrize("rule", ["absmax", "pow2"])
@pytest.mark.parametrize("gran", ["tensor", "row", "1x16", "3x5", "2x32"])
@pytest.mark.parametrize(("element", "largest"), [("int8", 127), ("int4", 7)])
def test_integers(element: str, largest: int, gran: str, rule: str) -> None:
    spec = QuantSpec.parse(f"{element}:{gran}:{rule}")
    for x in tensors(1):
        values, want = numbers(x), [0] * x.numel()
        scales = []
        for group in groups(tuple(x.shape), gran):
            scale = own_scale(max(abs(values[i]) for i in group), largest, rule == "pow2")
            scales.append(scale)
            for i in group:
                want[i] = max(-largest, min(largest, round(float(f32(values[i] / scale)))))  # half to even
        codes, got = encode(x, spec)
        assert numbers(got["scale"]) == scales
        if element == "int4":
            codes = unpack(codes, 4, x.shape[-1]).to(torch.int8) - 8
        assert codes.reshape(-1).tolist() == want
        back = decode(*encode(x, spec), spec, x.shape).reshape(-1).tolist()
        by_value = {i: s for s, g in zip(scales, groups(tuple(x.shape), gran), strict=True) for i in g}
        assert back == [float(f32(want[i]) * by_value[i]) for i in range(x.numel())]


def grid(ebits: int, mbits: int, bias: int, largest: float) -> list[float]:
    """The non-negative finite values by code, from the bit fields."""
    values = []
    for code in range(2 ** (ebits + mbits)):
        field, low = code >> mbits, code % 2**mbits
        value = 2.0 ** (1 - bias) * low / 2**mbits if field == 0 else 2.0 ** (field - bias) * (1 + low / 2**mbits)
        if value > largest:
            break
        values.append(value)
    return values


GRIDS = {
    "e4m3": grid(4, 3, 7, 448), "e4m3+fnuz": grid(4, 3, 8, 240), "e5m2": grid(5, 2, 15, 57344),
    "e5m2+fnuz": grid(5, 2, 16, 57344), "e3m2": grid(3, 2, 3, 28), "e2m3": grid(2, 3, 1, 7.5), "e2m1": grid(2, 1, 1, 6),
}  # fmt: skip


def nearest_code(size: float, values: list[float]) -> int:
    """Index of the nearest value, ties to the even code, the last where it is beyond it."""
    if size >= values[-1]:
        return len(values) - 1
    low = max(i for i, v in enumerate(values) if v <= size)
    below, above = size - values[low], values[low + 1] - size
    if below == above:
        return low + low % 2
    return low if below < above else low + 1


def signed(x: float, values: list[float]) -> float:
    return math.copysign(values[nearest_code(abs(x), values)], x)


@pytest.mark.parametrize("gran", ["tensor", "row", "1x16", "3x5"])
@pytest.mark.parametrize("element", ["e4m3", "e4m3+fnuz", "e5m2", "e5m2+fnuz"])
def test_fp8(element: str, gran: str) -> None:
    values, name = GRIDS[element], element.partition("+")
    for rule in ("absmax", "pow2"):
        spec = QuantSpec.parse(f"{name[0]}:{gran}:{rule}" + (f"+{name[2]}" if name[2] else ""))
        for x in tensors(2):
            numel, flat = x.numel(), numbers(x)
            want, scales = [0.0] * numel, []
            for group in groups(tuple(x.shape), gran):
                scale = own_scale(max(abs(flat[i]) for i in group), values[-1], rule == "pow2")
                scales.append(scale)
                for i in group:
                    want[i] = signed(float(f32(flat[i] / scale)), values)
            codes, got = encode(x, spec)
            assert numbers(got["scale"]) == scales
            assert codes.float().reshape(-1).tolist() == want


EMAX = {"e4m3": 8, "e5m2": 15, "e3m2": 4, "e2m3": 2, "e2m1": 2}
MBITS = {"e4m3": 3, "e5m2": 2, "e3m2": 2, "e2m3": 3, "e2m1": 1}


def shared(amax: float, name: str, rule: str) -> int:
    """The E8M0 byte by the definitions of NUMERICS, with exact logarithms."""
    if amax == 0:
        return 0
    if rule == "rceil":
        mantissa, exponent = math.frexp(float(f32(amax) / f32(GRIDS[name][-1])))
        power = exponent - 1 if mantissa == 0.5 else exponent
        if mantissa == 0:
            return 0
    else:
        if rule == "even":
            bits = int(np.array(amax, f32).view(np.int32)) + (1 << (23 - MBITS[name] - 1))
            exponent = (bits >> 23) - 127  # truncated: floor(log2) of the rounded number
            power = exponent - EMAX[name]
        else:
            mantissa, exponent = math.frexp(amax)
            above = rule == "ceil" and mantissa != 0.5
            power = exponent - 1 + above - EMAX[name]
    return min(max(power + 127, 0), 254)


@pytest.mark.parametrize("rule", ["floor", "ceil", "even", "rceil"])
@pytest.mark.parametrize("element", ["mxfp8_e4m3", "mxfp8_e5m2", "mxfp6_e3m2", "mxfp6_e2m3", "mxfp4"])
def test_mx(element: str, rule: str) -> None:
    spec, name = QuantSpec.parse(f"{element}:{rule}"), element.partition("_")[2] or "e2m1"
    for x in tensors(3):
        flat, want, scales = numbers(x), [0.0] * x.numel(), []
        for group in groups(tuple(x.shape), "1x32"):
            byte = shared(float(max(abs(flat[i]) for i in group)), name, rule)
            scales.append(byte)
            for i in group:
                want[i] = signed(float(flat[i]) / 2.0 ** (byte - 127), GRIDS[name])
        codes, got = encode(x, spec)
        assert got["scale"].reshape(-1).tolist() == scales
        if element.startswith("mxfp8"):
            units = codes.float().reshape(-1).tolist()
        else:
            bits = 4 if element == "mxfp4" else 6
            half = 1 << (bits - 1)
            raw = unpack(codes, bits, x.shape[-1]).reshape(-1).tolist()
            units = [GRIDS[name][c % half] * (-1 if c >= half else 1) for c in raw]
        assert units == want
        at = {i: s for s, g in zip(scales, groups(tuple(x.shape), "1x32"), strict=True) for i in g}
        back = decode(codes, got, spec, x.shape).reshape(-1).tolist()
        assert back == [float(f32(want[i] * 2.0 ** (at[i] - 127))) for i in range(x.numel())]


def dynamic_map() -> list[float]:
    values = [0.0, 1.0]
    for i in range(7):
        ends = [0.1 + 0.9 * j / 2**i for j in range(2**i + 1)]
        middles = [10.0 ** (i - 6) * (a + b) / 2 for a, b in itertools.pairwise(ends)]
        values += middles + [-v for v in middles]
    return sorted(values)


NF4 = [-1, -.6961928, -.52507305, -.39491749, -.28444138, -.18477343, -.09105004, 0, .0795803, .1609302, .2461123,
       .33791524, .44070983, .562617, .72295684, 1]  # fmt: skip


@pytest.mark.parametrize("element", ["nf4:block64", "nf4:block32", "dynamic8:block64"])
def test_lookup(element: str) -> None:
    """Nearest entry; the published tables have eight digits, so codes may differ within 1e-6 of a midpoint."""
    spec, table = QuantSpec.parse(element), NF4 if element.startswith("nf4") else dynamic_map()
    for x in tensors(4):
        flat = numbers(x)
        codes, scales = encode(x, spec)
        got = unpack(codes, 4, x.numel(), high_first=True) if spec.element == "nf4" else codes
        size = spec.granularity.cols
        blocks = flat_groups(x.numel(), size)
        assert numbers(scales["scale"]) == [max(abs(flat[i]) for i in b) for b in blocks]
        for block in blocks:
            absmax = float(max(abs(flat[i]) for i in block))
            for i in block:
                code, unit = int(got[i]), float(flat[i]) / max(absmax, 1e-38)
                best = min(abs(unit - t) for t in table)
                assert abs(unit - table[code]) <= best + 1e-6, (unit, code)
                assert flat[i] != 0 or table[code] == 0


@pytest.mark.parametrize("element", ["q8_0", "q4_0"])
def test_ggml(element: str) -> None:
    spec = QuantSpec.parse(element)
    for x in tensors(5, rows_of_32=True):
        x = x.float().clamp(-6e4, 6e4)
        flat, want, scales = numbers(x), [], []
        for block in flat_groups(x.numel(), 32):
            values = [flat[i] for i in block]
            top = max(values, key=abs)
            d = f32(abs(top) / f32(127)) if element == "q8_0" else f32(top / f32(-8))
            with np.errstate(over="ignore"):
                inverse = f32(0) if d == 0 else f32(f32(1) / d)
            scales.append(float(np.float16(d)))
            for v in values:
                if not math.isfinite(inverse):
                    want.append(None)  # 1 / d overflows: ggml itself leaves this undefined
                    continue
                unit = f32(v * inverse)
                if element == "q8_0":
                    want.append(int(math.copysign(math.floor(abs(float(unit)) + 0.5), unit)))
                else:
                    want.append(min(15, int(f32(unit + f32(8.5)))))
        codes, got = encode(x, spec)
        assert got["scale"].reshape(-1).tolist() == scales
        raw = codes.reshape(-1, 32 if element == "q8_0" else 16).tolist()
        mine = [c for b in raw for c in (b if element == "q8_0" else [v & 15 for v in b] + [v >> 4 for v in b])]
        assert all(w is None or m == w for m, w in zip(mine, want, strict=True))
        assert decode(codes, got, spec, x.shape).isfinite().all()


@pytest.mark.parametrize("gran", ["tensor", "row", "group16"])
def test_ternary(gran: str) -> None:
    """Scale = mean magnitude, codes -1, 0, 1; within fp32's rounding of the mean."""
    spec = QuantSpec.parse(f"ternary:{gran}")
    for x in tensors(6):
        if x.float().abs().max() > 1e30:
            continue  # a sum of such values overflows
        flat = numbers(x)
        codes, got = encode(x, spec)
        mine = unpack(codes, 2, x.shape[-1]).to(torch.int8).reshape(-1) - 1
        cut = groups(tuple(x.shape), gran if gran in ("tensor", "row") else "1x16")
        for group, scale in zip(cut, got["scale"].reshape(-1).tolist(), strict=True):
            mean = math.fsum(abs(float(flat[i])) for i in group) / len(group)
            if mean < 1.2e-38 and scale == 1:  # below the smallest normal number
                continue
            assert scale == pytest.approx(mean, rel=1e-5)
            for i in group:
                unit = float(flat[i]) / scale
                if abs(abs(unit) - 0.5) > 1e-5:
                    assert int(mine[i]) == (0 if abs(unit) < 0.5 else math.copysign(1, unit))


def test_expanded() -> None:
    """The stored k, scale and centre are the definition's in bf16, and the codes follow from the stored ones."""
    spec, e4m3 = QuantSpec.parse("e4m3_expanded:group64"), GRIDS["e4m3"]
    for x in itertools.chain(
        tensors(7), (torch.full((64,), 3.0039) + 1e-4 * torch.rand(64), torch.logspace(-40, 38, 64))
    ):
        flat = numbers(x)
        codes, got = encode(x, spec)
        back = decode(codes, got, spec, x.shape)
        assert back.isfinite().all() and ((back == 0) | (x.float() != 0)).all()
        for n, group in enumerate(flat_groups(x.numel(), 64)):
            sizes = [abs(float(flat[i])) for i in group if flat[i] != 0]
            if not sizes or min(sizes) < 1e-36:
                continue
            k, scale, centre = (float(got[name][n]) for name in ("power", "scale", "centre"))
            spread = math.log(max(sizes)) - math.log(min(sizes))
            if spread > 0:
                assert k == pytest.approx(min(math.log(448**2 / 2) / spread, 4096), rel=1e-2)
            assert centre == pytest.approx(math.sqrt(max(sizes) * min(sizes)), rel=2**-8)
            top = max(k * (math.log(s) - math.log(centre)) for s in sizes)
            assert scale == pytest.approx(math.exp(top) / 448, rel=2**-7 + 1e-5 * k)
            for i in group:
                if flat[i] == 0:
                    continue
                unit = math.exp(k * (math.log(abs(float(flat[i]))) - math.log(centre))) / scale
                code = abs(float(codes.reshape(-1)[i].float()))
                slack = 1 + 1e-5 * (k + 1)
                assert signed(min(unit / slack, 448), e4m3) <= code <= signed(min(unit * slack, 448), e4m3)


@pytest.mark.parametrize("rule", ["floor", "ceil", "even", "rceil"])
def test_every_exponent_of_mx_scales(rule: str) -> None:
    """2^e, its neighbours and 1.5 · 2^e for every e, subnormal numbers included."""
    from lumen.formats.floats import GRIDS as TABLE
    from lumen.formats.mx import shared_exponent

    powers = torch.tensor([2.0**e for e in range(-149, 128)], dtype=torch.float64).float()
    up, down = (torch.nextafter(powers, torch.tensor(to)) for to in (3e38, 0.0))
    amax = torch.cat([powers, up, down, powers[:-1] * 1.5, powers[2:-1] * 1.75, powers[2:-1] * 1.25])
    for name in EMAX:
        want = [shared(v, name, rule) for v in amax.tolist()]
        assert shared_exponent(amax, TABLE[name, "ocp"], rule).tolist() == want, name


def test_every_power_of_two_scale() -> None:
    from lumen.formats.scales import absmax_scale

    amax = torch.tensor([2.0**e for e in range(-126, 127)])
    for x in (amax, torch.nextafter(amax, torch.tensor(3e38)), torch.nextafter(amax, torch.tensor(0.0))):
        got = absmax_scale(x, 1.0, rule="pow2").tolist()
        assert got == [float(own_scale(f32(v), 1.0, True)) for v in x.tolist()]


def hadamard(n: int) -> np.ndarray:
    """±1 by the parity of the common bits of row and column."""
    return np.array([[(-1.0) ** bin(i & j).count("1") for j in range(n)] for i in range(n)]) / math.sqrt(n)


@pytest.mark.parametrize("width", [16, 32])
def test_hadamard(width: int) -> None:
    """H times a diagonal of signs, orthonormal; the product of two transformed operands is the product."""
    from lumen.formats.hadamard import inverse, transform

    matrix = transform(torch.eye(width), width).double().numpy()
    signs = matrix[:, 0] * math.sqrt(width)
    assert set(signs.round(6)) == {-1.0, 1.0}
    assert np.allclose(matrix, signs[:, None] * hadamard(width), atol=1e-6)
    a, b = torch.randn(5, 70), torch.randn(6, 70)
    assert torch.allclose(transform(a, width) @ transform(b, width).t(), a @ b.t(), atol=1e-4)
    assert torch.allclose(inverse(transform(a, width), width, 70), a, atol=1e-5)
