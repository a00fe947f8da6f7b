"""The expected figures, their bounds and how each is measured: the one place where they are written down.

A figure is wanted `near` its value (± the bound), `at most` or `at least`.  Sampled ones are taken on fixed Gaussian
tensors; `rows` says how large (rows of 4096): 4096 for the published SQNR table, less where it is to be quick, which
moves them by less than their bounds.  Only one INT8 scale per tensor depends on the size: its value is looked up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache, partial

import torch

from lumen.bench.numerics import measure as m
from lumen.core.random import random_bits
from lumen.formats import Noise, QuantSpec, bits_per_value
from lumen.formats.floats import GRIDS, MiniFloat, round_to_grid
from lumen.formats.lookup import dynamic4_table, dynamic8_table, to_table
from lumen.kernels.reference.optimizer import stochastic_round_bf16

COLS = 4096
FULL, QUICK = 4096, 256
"""Rows of the test tensors: the published table's, and enough to check it in seconds."""


@dataclass(frozen=True)
class Figure:
    """One line of a table.  kind: `near` (within ± bound), `at most`, `at least`.  unit: dB, or empty."""

    table: str
    name: str
    want: float
    bound: float
    measure: Callable[[], float]
    kind: str = "near"
    unit: str = ""

    def holds(self, got: float) -> bool:
        """Whether a measured value is within the bound (NaN never is)."""
        if self.kind == "near":
            return abs(got - self.want) <= self.bound
        return got <= self.want if self.kind == "at most" else got >= self.want

    @property
    def id(self) -> str:
        return f"{self.table}: {self.name}"


SQNR = {
    "int8:row": (41.2, 23.3), "int8:block32": (45.4, 38.9),
    "e4m3": (31.5, 31.6), "e4m3:1x128": (31.8, 38.2), "e4m3+fnuz": (31.6, 31.6), "e5m2": (25.6, 25.6),
    "mxfp8_e4m3:floor": (30.6, 28.2), "mxfp8_e4m3:even": (31.2, 29.9), "mxfp8_e4m3:rceil": (31.5, 31.6),
    "mxfp4:floor": (18.8, 15.9), "mxfp4:rceil": (18.8, 16.2), "mxfp4:ceil": (16.8, 15.4), "mxfp4:even": (19.0, 16.6),
    "mxfp4:even+hadamard16": (19.0, 19.2), "mxfp4:even+hadamard32": (19.0, 19.5),
    "nf4": (20.7, 16.8),
}  # fmt: skip
"""dB on N(0, 1), and on the same with one channel in 256 scaled by 30."""

INT8_TENSOR = {2**16: 39.7, 2**20: 39.3, 2**22: 38.8, 2**24: 38.4}
"""dB of `int8:tensor` on N(0, 1) by number of values: the largest of more values is larger."""
INT8_TENSOR_OUTLIERS = 17.8
"""dB with outliers, for 2^22 values.  The largest of some thousand outliers differs from draw to draw: of 400 draws,
90 % lie in 16.6 … 18.5 at 2^22 values and in 16.0 … 17.6 at 2^24.  So the codec is also held to what amax predicts."""

GEMM = {"int8:row": 39.1, "e4m3:row": 28.6, "e5m2:row": 22.6}
"""dB of a product's output, K = 1024, row scales, Gaussian operands."""

NF4_ERROR = {32: 0.067746, 64: 0.072798, 128: 0.076831, 256: 0.080337, 4096: 0.092547}
FP4_ERROR = {32: 0.088925, 64: 0.096543, 128: 0.102969, 256: 0.108684, 4096: 0.129536}
"""Mean |error| on N(0, 1) by block, as bitsandbytes' tests publish it."""

BNB_FP4 = (0.0, 0.005208333333, 0.1666666667, 0.25, 0.3333333333, 0.5, 0.6666666667, 1.0)
"""The magnitudes of bitsandbytes' `fp4`, which is not E2M1: the format is theirs, only its error is checked here."""

CLOSED_FORM = {
    "uniform 8-bit": 8.78e-5, "uniform 4-bit": 0.01154, "E2M1": 0.01268, "ternary": 0.19017, "1-bit": 0.36338,
}  # fmt: skip
"""MSE on N(0, 1) with the best scale (Quartet's notebook).  The uniform grids are mid-rise with 2^b levels."""


@lru_cache(maxsize=2)
def _x(rows: int, hard: bool = False) -> torch.Tensor:
    return m.outliers(_x(rows)) if hard else m.gaussian(rows, COLS)


def figures(rows: int = QUICK) -> list[Figure]:
    """All of them, in the order of the tables; nothing is measured yet."""
    tables = (_sqnr, _gemm, _errors, _mse, _closed_form, _stochastic, _maps, _bytes)
    return [figure for table in tables for figure in table(rows)]


def _sqnr(rows: int) -> Iterator[Figure]:
    def of(text: str, hard: bool, rows: int = rows) -> Callable[[], float]:
        return lambda: m.sqnr(_x(rows, hard), m.trip(_x(rows, hard), text))

    for numel, want in INT8_TENSOR.items():
        if numel <= rows * COLS:
            name = f"int8:tensor, 2^{numel.bit_length() - 1} values"
            yield Figure("SQNR", name, want, 0.3, of("int8:tensor", False, numel // COLS), unit="dB")
    for text, (plain, _) in SQNR.items():
        yield Figure("SQNR", QuantSpec.parse(text).full(), plain, 0.3, of(text, False), unit="dB")
    if rows == FULL:
        name = "int8:tensor, 2^22 values"
        yield Figure("SQNR, outliers", name, INT8_TENSOR_OUTLIERS, 0.3, of("int8:tensor", True, 1024), unit="dB")
    predicted = lambda: m.sqnr(_x(rows, True), m.trip(_x(rows, True), "int8:tensor")) - _uniform(_x(rows, True))  # noqa: E731
    yield Figure("SQNR, outliers", "int8:tensor, less what its amax predicts", 0, 0.02, predicted, unit="dB")
    for text, (_, hard) in SQNR.items():
        yield Figure("SQNR, outliers", QuantSpec.parse(text).full(), hard, 0.3, of(text, True), unit="dB")


def _uniform(x: torch.Tensor) -> float:
    """dB of x in steps of amax / 127 with an error that is uniform over a step."""
    step = x.abs().max().double() / 127
    return float(10 * torch.log10(x.double().square().mean() * 12 / step.square()))


def _gemm(rows: int) -> Iterator[Figure]:
    def of(text: str) -> float:
        a, b = m.gaussian(512, 1024), m.gaussian(512, 1024, seed=1)
        return m.sqnr(a.double() @ b.double().t(), m.trip(a, text).double() @ m.trip(b, text).double().t())

    for text, want in GEMM.items():
        yield Figure("SQNR of a GEMM's output", f"{text}, K = 1024", want, 0.3, partial(of, text), unit="dB")


def bnb_fp4(x: torch.Tensor, block: int) -> torch.Tensor:
    """fp32 x [...] after a round trip through bitsandbytes' fp4; its size must be a multiple of the block."""
    table = torch.tensor([*(-v for v in reversed(BNB_FP4[1:])), *BNB_FP4])
    blocks = x.reshape(-1, block)
    absmax = blocks.abs().amax(1)
    return (table[to_table(blocks, absmax, table)] * absmax[:, None]).reshape(x.shape)


def _errors(rows: int) -> Iterator[Figure]:
    x = lambda: _x(min(4 * rows, 1024))  # noqa: E731  2^22 values: a block of 4096 is few samples
    dynamic = lambda: (m.trip(x(), "dynamic8") - x()).abs()  # noqa: E731
    for name, published in (("nf4", NF4_ERROR), ("bitsandbytes fp4", FP4_ERROR)):
        for block, want in published.items():

            def error(name: str = name, block: int = block) -> float:
                got = m.trip(x(), f"nf4:block{block}") if name == "nf4" else bnb_fp4(x(), block)
                return float((got - x()).abs().mean())

            yield Figure("mean |error| on N(0, 1)", f"{name}, block {block}", want, 3e-4, error)
    yield Figure("mean |error| on N(0, 1)", "dynamic8, block 256", 0.011, 0, lambda: float(dynamic().mean()), "at most")
    yield Figure("mean |error| on N(0, 1)", "dynamic8, as measured", 0.0085, 3e-4, lambda: float(dynamic().mean()))
    relative = lambda: float((dynamic() / x().abs().clamp_min(1e-8)).mean())  # noqa: E731
    yield Figure("mean |error| on N(0, 1)", "dynamic8, relative", 0.018, 0, relative, "at most")
    yield Figure("mean |error| on N(0, 1)", "dynamic8, relative, as measured", 0.0155, 5e-4, relative)


def _mse(rows: int) -> Iterator[Figure]:
    x = lambda: _x(min(4 * rows, 1024))  # noqa: E731

    def e2m1() -> float:
        blocks = x().reshape(-1, 64)
        scale = blocks.abs().amax(1, keepdim=True) / 6
        return m.mse(blocks, round_to_grid(blocks / scale, GRIDS["e2m1", "ocp"]) * scale)

    def added() -> float:
        return m.mse(x(), m.trip(x(), "nf4+dq")) / m.mse(x(), m.trip(x(), "nf4")) - 1

    table = "MSE on N(0, 1), block 64"
    yield Figure(table, "nf4", 0.00846, 3e-5, lambda: m.mse(x(), m.trip(x(), "nf4")))
    yield Figure(table, "E2M1 with fp32 scale", 0.01118, 3e-5, e2m1)
    yield Figure(table, "int4 (±7)", 0.01158, 3e-5, lambda: m.mse(x(), m.trip(x(), "int4:block64")))
    yield Figure(table, "added by double quantisation", 0.001, 0, added, "at most")


def _closed_form(rows: int) -> Iterator[Figure]:
    def mid_rise(bits: int) -> Callable[[torch.Tensor], torch.Tensor]:
        half = 2 ** (bits - 1)
        return lambda y: (torch.floor(y) + 0.5).clamp(-half + 0.5, half - 0.5)

    grid: MiniFloat = GRIDS["e2m1", "ocp"]
    quantise: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "uniform 8-bit": mid_rise(8), "uniform 4-bit": mid_rise(4), "1-bit": mid_rise(1),
        "E2M1": lambda y: round_to_grid(y.float(), grid).double(), "ternary": lambda y: y.round().clamp(-1, 1),
    }  # fmt: skip
    scales = torch.logspace(-2, 0.5, 40, dtype=torch.float64)
    for name, want in CLOSED_FORM.items():
        got = partial(m.best_clip, quantise[name], scales)
        yield Figure("MSE on N(0, 1), optimal clipping", name, want, 0.002 * want, got)


def bf16_updates(stochastic: bool, weights: int = 4096) -> float:
    """Mean of bf16 weights of 1 after 1000 updates of -1e-4."""
    w = torch.ones(weights, dtype=torch.bfloat16)
    for step in range(1000):
        moved = w.float() - 1e-4
        bits = random_bits(weights, seed=0, name="w/weight", step=step) if stochastic else None
        w = moved.to(torch.bfloat16) if bits is None else stochastic_round_bf16(moved, bits)
    return float(w.float().mean())


def _stochastic(rows: int) -> Iterator[Figure]:
    table = "stochastic rounding"
    x = lambda: _x(min(rows, 512))  # noqa: E731
    draw = Noise("x/grad_output")

    def twice() -> float:
        return m.mse(x(), m.trip(x(), "int8:row+sr", draw)) / m.mse(x(), m.trip(x(), "int8:row"))

    nearest = lambda: m.slope(x(), m.trip(x(), "mxfp4:floor"))  # noqa: E731
    unbiased = lambda: m.slope(x(), m.trip(x(), "mxfp4:rceil+sr", draw))  # noqa: E731
    yield Figure(table, "mxfp4:floor, nearest: ⟨y,x⟩/⟨x,x⟩", 0.980, 0.001, nearest)
    yield Figure(table, "mxfp4:rceil+sr: ⟨y,x⟩/⟨x,x⟩", 1.000, 0.0005, unbiased)
    yield Figure(table, "bf16 weight 1, 1000 × -1e-4, nearest", 1.000, 0, lambda: bf16_updates(False))
    yield Figure(table, "bf16 weight 1, 1000 × -1e-4, stochastic", 0.90, 0.002, lambda: bf16_updates(True))
    yield Figure(table, "int8:row+sr: MSE over that of nearest", 2.0, 0.01, twice)


def _maps(rows: int) -> Iterator[Figure]:
    table = "maps of optimizer states"
    signed, unsigned = dynamic8_table(), dynamic8_table(signed=False)
    first, second = dynamic4_table(), dynamic4_table(signed=False)
    positive = lambda values: min(v for v in values if v > 0)  # noqa: E731
    yield Figure(table, "dynamic8 signed: distinct values", 256, 0, lambda: len(set(signed)))
    yield Figure(table, "dynamic8 signed: smallest positive", 5.5e-7, 5e-9, lambda: positive(signed))
    yield Figure(table, "dynamic8 signed: least", -0.99297, 1e-5, lambda: min(signed))
    yield Figure(table, "dynamic8 unsigned: distinct values", 256, 0, lambda: len(set(unsigned)))
    yield Figure(table, "dynamic8 unsigned: smallest positive", 3.25e-7, 5e-9, lambda: positive(unsigned))
    yield Figure(table, "4-bit Adam, first moment: distinct values", 16, 0, lambda: len(set(first)))
    yield Figure(table, "4-bit Adam, first moment: least", -0.8875, 0, lambda: first[0])
    yield Figure(table, "4-bit Adam, second moment: least (no zero)", 1 / 16, 0, lambda: second[0])


def _bytes(rows: int) -> Iterator[Figure]:
    shape = (FULL, COLS)

    def stored(text: str, share: float = 1.0) -> float:
        return share * bits_per_value(QuantSpec.parse(text), shape)

    for text, want in (("nf4", 4.5), ("nf4+dq", 4.127)):
        yield Figure("stored bits per value", text, want, 5e-4, partial(stored, text))
    for text, want in (("dynamic8", 2.04), ("dynamic4", 1.07), ("e4m3_expanded", 2.07)):
        table = "bytes per parameter of two optimizer states"
        yield Figure(table, text, want, 0, partial(stored, text, 2 / 8), "at most")
