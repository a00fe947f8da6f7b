"""The formats that a spec may name, as data: what each can be combined with, and what it means when you say nothing.

A combination that is not in this table does not exist: it raises, and the message lists what does.  Nothing here is
ever replaced silently by something near it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Format:
    """One element format and its possible partners.

    bits:          bits per stored code.
    granularities: kinds of scale groups (`tensor`, `row`, `block`, `group`, `tile`).
    granularity:   the default, as written in a spec.
    rules:         how the scale follows from the group; the first is the default.
    transforms:    what may be applied before quantising, besides nothing.
    double_quant:  whether the scales themselves may be quantised (`+dq`).
    stochastic:    whether stochastic rounding (`+sr`) is defined.
    delayed:       whether the scale may come from a history or a calibration (`+delayed`, `+static`).
    flat:          blocks run over the flattened tensor (bitsandbytes, ggml), not along each row.
    """

    name: str
    bits: int
    granularities: tuple[str, ...]
    granularity: str
    rules: tuple[str, ...]
    transforms: tuple[str, ...] = ()
    double_quant: bool = False
    stochastic: bool = True
    delayed: bool = False
    flat: bool = False


_ALL = ("tensor", "row", "block", "group", "tile")
_HADAMARD = ("hadamard16", "hadamard32")
_MX = ("floor", "rceil", "even", "ceil")


def _mx(first: str) -> tuple[str, ...]:
    return (first, *(rule for rule in _MX if rule != first))


def _fp8(name: str) -> Format:
    return Format(name, 8, _ALL, "tensor", ("absmax", "pow2"), ("smooth", *_HADAMARD), delayed=True)


def _mx_format(name: str, bits: int, rule: str) -> Format:
    return Format(name, bits, ("block",), "block32", _mx(rule), _HADAMARD)


FORMATS: dict[str, Format] = {
    f.name: f
    for f in (
        Format("int8", 8, _ALL, "row", ("absmax", "pow2"), ("smooth", *_HADAMARD), delayed=True),
        Format("int4", 4, _ALL, "group128", ("absmax", "pow2"), _HADAMARD),
        Format("ternary", 2, ("tensor", "row", "group"), "tensor", ("absmean",), stochastic=False),
        _fp8("e4m3"),
        _fp8("e5m2"),
        _mx_format("mxfp8_e4m3", 8, "rceil"),
        _mx_format("mxfp8_e5m2", 8, "rceil"),
        _mx_format("mxfp6_e3m2", 6, "rceil"),
        _mx_format("mxfp6_e2m3", 6, "rceil"),
        _mx_format("mxfp4", 4, "even"),
        Format("nf4", 4, ("block",), "block64", ("absmax",), double_quant=True, stochastic=False, flat=True),
        Format("dynamic8", 8, ("block",), "block256", ("absmax",), flat=True),
        Format("dynamic4", 4, ("block",), "block128", ("absmax",), flat=True),
        Format("e4m3_expanded", 8, ("group",), "group256", ("expand",), stochastic=False, flat=True),
        Format("codebook", 4, ("block",), "block64", ("absmax",), stochastic=False, flat=True),
        Format("q8_0", 8, ("block",), "block32", ("absmax",), stochastic=False),
        Format("q4_0", 4, ("block",), "block32", ("absmax",), stochastic=False),
    )
}

DIALECTS = ("ocp", "fnuz")
"""FP8 encodings: OCP everywhere; FNUZ is what gfx942's matrix units read (transient operands only, never stored)."""

FLOAT8 = ("e4m3", "e5m2")
"""Formats for which the dialect matters."""
