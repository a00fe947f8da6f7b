"""QuantSpec: how one tensor is quantised, in one line of text.

    format[:granularity][:rule][+transform][+dq][+sr]      int8:row   e4m3:1x128   mxfp4:even+hadamard16+sr

**Format** is the grid of representable values.  **Granularity** says which values share one scale: the whole
`tensor`, each `row` (a token, or an output channel), `blockN` or `groupN` (N neighbours along the last dimension, which
is the contraction dimension), or a tile `RxC` (`1x128`, `128x128`).  The **rule** turns a group into its scale.  A
**transform** spreads outliers before quantising.  `+dq` quantises the scales themselves; `+sr` rounds
stochastically.  Three further suffixes complete the inverse: `+delayed` and `+static` say where the scale comes from
when not from the tensor itself, `+fnuz` names the dialect of a transient FP8 operand on gfx942.

Omitted parts take the format's default, and `str(spec)` omits what is default: `parse(str(s)) == s` for every spec.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from difflib import get_close_matches

from lumen.core import QuantError
from lumen.formats.catalog import DIALECTS, FLOAT8, FORMATS, Format

SCALINGS = ("dynamic", "delayed", "static")
_GRANULARITY = re.compile(r"^(tensor|row)$|^(block|group)(\d+)$|^(\d+)x(\d+)$")


@dataclass(frozen=True)
class Granularity:
    """Which values share a scale: `rows` × `cols` neighbours of the last two dimensions; 0 means the whole extent."""

    kind: str
    rows: int
    cols: int

    @classmethod
    def parse(cls, text: str) -> Granularity | None:
        """`tensor`, `row`, `block32`, `group128`, `1x128`, `128x128`; None where `text` is none of these."""
        match = _GRANULARITY.match(text)
        if match is None:
            return None
        if match[1]:
            return cls(match[1], 0 if match[1] == "tensor" else 1, 0)
        rows, cols = (1, int(match[3])) if match[2] else (int(match[4]), int(match[5]))
        if rows < 1 or cols < 1:
            return None
        return cls(match[2] or "tile", rows, cols)

    def __str__(self) -> str:
        if self.kind in ("tensor", "row"):
            return self.kind
        return f"{self.rows}x{self.cols}" if self.kind == "tile" else f"{self.kind}{self.cols}"

    @property
    def transposes(self) -> bool:
        """Whether the scales stay valid for the transposed tensor: one scale, or square tiles."""
        return self.kind == "tensor" or (self.kind == "tile" and self.rows == self.cols)


@dataclass(frozen=True)
class QuantSpec:
    """A checked combination; build it with `QuantSpec.parse`.  Raises QuantError where the parts do not fit."""

    element: str
    granularity: Granularity
    rule: str
    transform: str = "none"
    double_quant: bool = False
    rounding: str = "nearest"
    scaling: str = "dynamic"
    dialect: str = "ocp"

    def __post_init__(self) -> None:
        _check(self)

    @property
    def format(self) -> Format:
        """The catalogue entry of the element format."""
        return FORMATS[self.element]

    @classmethod
    def parse(cls, text: str | QuantSpec) -> QuantSpec:
        """Read the one-line form.  Raises QuantError naming what exists."""
        if isinstance(text, QuantSpec):
            return text
        if not isinstance(text, str) or not text.strip():
            raise QuantError(f"a spec is text such as 'int8:row', not {text!r}", fix="see docs/formats.md")
        head, *suffixes = text.strip().split("+")
        name, *parts = head.split(":")
        if name not in FORMATS:
            near = get_close_matches(name, FORMATS, n=1)
            raise QuantError(
                f"there is no number format {name!r}" + (f"; did you mean {near[0]!r}?" if near else ""),
                where=text,
                fix="formats: " + ", ".join(FORMATS),
            )
        form = FORMATS[name]
        granularity = Granularity.parse(form.granularity)
        assert granularity is not None, name
        fields: dict[str, object] = {"granularity": granularity, "rule": form.rules[0]}
        seen: set[str] = set()
        for part in parts:
            parsed = Granularity.parse(part)
            field = "granularity" if parsed else "rule"
            if parsed is None and part not in form.rules:
                raise QuantError(
                    f"{part!r} is neither a granularity nor a scale rule of {name}",
                    where=text,
                    fix=f"granularities: {_kinds(form)}; rules: {', '.join(form.rules)}",
                )
            _once(seen, field, text)
            fields[field] = parsed or part
        for suffix in suffixes:
            field, value = _suffix(suffix, text)
            _once(seen, field, text)
            fields[field] = value
        return cls(name, **fields)  # type: ignore[arg-type]

    def __str__(self) -> str:
        form = self.format
        parts = [self.element]
        if str(self.granularity) != form.granularity:
            parts.append(str(self.granularity))
        if self.rule != form.rules[0]:
            parts.append(self.rule)
        suffixes = [self.transform] if self.transform != "none" else []
        suffixes += ["dq"] if self.double_quant else []
        suffixes += ["sr"] if self.rounding == "stochastic" else []
        suffixes += [self.scaling] if self.scaling != "dynamic" else []
        suffixes += [self.dialect] if self.dialect != "ocp" else []
        return "+".join([":".join(parts), *suffixes])

    def full(self) -> str:
        """The one-line form with granularity and rule written out, as reports show it."""
        suffix = str(self).partition("+")
        return f"{self.element}:{self.granularity}:{self.rule}" + (f"+{suffix[2]}" if suffix[2] else "")

    def with_(self, **changes: object) -> QuantSpec:
        """A changed copy, checked again."""
        return replace(self, **changes)  # type: ignore[arg-type]


def _once(seen: set[str], field: str, text: str) -> None:
    if field in seen:
        raise QuantError(f"the spec gives its {field.replace('_', ' ')} twice", where=text)
    seen.add(field)


def _suffix(suffix: str, text: str) -> tuple[str, object]:
    if suffix == "dq":
        return "double_quant", True
    if suffix == "sr":
        return "rounding", "stochastic"
    if suffix in ("delayed", "static"):
        return "scaling", suffix
    if suffix in DIALECTS:
        return "dialect", suffix
    transforms = {t for form in FORMATS.values() for t in form.transforms}
    if suffix in transforms:
        return "transform", suffix
    raise QuantError(
        f"there is no suffix '+{suffix}'",
        where=text,
        fix=f"suffixes: {', '.join(sorted(transforms))}, dq, sr, delayed, static, fnuz",
    )


def _kinds(form: Format) -> str:
    shown = {"block": "blockN", "group": "groupN", "tile": "RxC"}
    return ", ".join(shown.get(kind, kind) for kind in form.granularities)


def _check(spec: QuantSpec) -> None:
    """Refuse what the catalogue does not have, and say what it has."""
    form = FORMATS.get(spec.element)
    if form is None:
        raise QuantError(f"there is no number format {spec.element!r}", fix="formats: " + ", ".join(FORMATS))
    name, gran = spec.element, spec.granularity

    def refuse(what: str, fix: str) -> None:
        raise QuantError(f"{name} {what}", fix=fix)

    if gran.kind not in form.granularities:
        refuse(f"has no scale per {gran.kind}", f"granularities of {name}: {_kinds(form)}")
    if (name.startswith("mxfp") or name in ("q8_0", "q4_0")) and gran.cols != 32:
        refuse(f"has blocks of 32, not {gran.cols}", f"write '{name}' or '{name}:block32'")
    if spec.rule not in form.rules:
        refuse(f"has no scale rule {spec.rule!r}", f"rules of {name}: {', '.join(form.rules)}")
    if spec.transform != "none":
        if spec.transform not in form.transforms:
            refuse(f"cannot take the transform {spec.transform}", f"transforms of {name}: {_list(form.transforms)}")
        if spec.transform.startswith("hadamard") and gran.kind in ("block", "group", "tile"):
            width = int(spec.transform.removeprefix("hadamard"))
            if gran.cols % width:
                refuse(f"in groups of {gran.cols} cannot take {spec.transform}", f"groups must be multiples of {width}")
    if spec.double_quant and not form.double_quant:
        names = [f.name for f in FORMATS.values() if f.double_quant]
        refuse("has no double quantisation", f"'+dq' exists for {', '.join(names)}")
    if spec.rounding not in ("nearest", "stochastic"):
        refuse(f"cannot round {spec.rounding!r}", "roundings: nearest, stochastic (+sr)")
    if spec.rounding == "stochastic" and not form.stochastic:
        names = [f.name for f in FORMATS.values() if f.stochastic]
        refuse("has no stochastic rounding", f"'+sr' exists for {', '.join(names)}")
    if spec.scaling not in SCALINGS:
        refuse(f"has no scaling {spec.scaling!r}", f"scalings: {', '.join(SCALINGS)}")
    if spec.scaling != "dynamic" and (not form.delayed or gran.kind != "tensor"):
        names = [f.name for f in FORMATS.values() if f.delayed]
        refuse(f"per {gran.kind} cannot use {spec.scaling} scales", f"they exist per tensor, for {', '.join(names)}")
    if spec.dialect not in DIALECTS:
        refuse(f"has no dialect {spec.dialect!r}", f"dialects: {', '.join(DIALECTS)}")
    if spec.dialect != "ocp" and name not in FLOAT8:
        refuse(f"has no dialect {spec.dialect}", f"dialects exist for {', '.join(FLOAT8)}")


def _list(names: tuple[str, ...]) -> str:
    return ", ".join(names) or "none"
