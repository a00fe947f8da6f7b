"""The base of every configuration class.

A configuration is a set of typed pydantic fields; the string literal under a field is its documentation (unit and
default), which `lumen config schema` and the key table print.  Unknown keys are errors: `lumen.config` turns them into
suggestions with the file and line.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema


def _number_from_text(value: Any) -> Any:
    """YAML 1.1 reads `1e-4` as text; where a number is due, text that reads as one is one, and true is not 1."""
    if isinstance(value, bool):
        raise ValueError("must be a number")
    if isinstance(value, str):
        try:
            return float(value.strip().replace("_", ""))
        except ValueError:
            return value
    return value


def _integer_from_text(value: Any) -> Any:
    number = _number_from_text(value)
    if isinstance(number, float) and number.is_integer():
        return int(number)
    return number


Float = Annotated[float, BeforeValidator(_number_from_text)]
"""A float that may be written as text (`1e-4`, `"2e-5"`)."""

Int = Annotated[int, BeforeValidator(_integer_from_text)]
"""An integer that may be written as text or as a whole float (`"8"`, `1e3`)."""

Count = Annotated[Int, Field(ge=1)]
"""A whole number of things, at least 1."""

Size = Annotated[Int, Field(ge=0)]
"""A whole number, at least 0."""

Positive = Annotated[Float, Field(gt=0)]
"""A number above 0."""

NonNegative = Annotated[Float, Field(ge=0)]
"""A number that is 0 or more."""

Share = Annotated[Float, Field(ge=0, le=1)]
"""A number from 0 to 1."""

PositiveShare = Annotated[Float, Field(gt=0, le=1)]
"""A number above 0, up to 1."""


def _as_list(value: Any) -> Any:
    """`a, b` and `[a, b]` mean the same, as in LLaMA-Factory's files."""
    if isinstance(value, str):
        return [part.strip() for part in value.split(",") if part.strip()]
    return value


_EITHER = WithJsonSchema({"anyOf": [{"type": "array", "items": {"type": "string"}}, {"type": "string"}]})

StrList = Annotated[list[str], BeforeValidator(_as_list), _EITHER]
"""A list of strings, or one comma-separated string."""


class Config(BaseModel):
    """Base class: unknown keys are errors, docstrings under fields are their documentation."""

    model_config = ConfigDict(
        extra="forbid",
        use_attribute_docstrings=True,
        validate_default=True,
        protected_namespaces=(),
        coerce_numbers_to_str=True,
        allow_inf_nan=False,
    )
