"""The spec text: exact inverse, defaults, and refusals that name what exists."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lumen.core import QuantError
from lumen.formats import FORMATS, QuantSpec
from lumen.formats.spec import Granularity
from lumen.quant import recipes

EXAMPLES = [
    "int8", "int8:block32", "e4m3", "e4m3:1x128", "e4m3:128x128", "mxfp8_e4m3", "nf4+dq", "int4", "int8:tensor",
    "mxfp4+hadamard16+sr", "mxfp4:rceil+hadamard16+sr", "e4m3:row:pow2", "int8+smooth", "e5m2+delayed", "ternary",
    "e4m3+fnuz", "q8_0", "dynamic8", "dynamic4+sr", "e4m3_expanded", "codebook", "mxfp6_e3m2:floor", "int4:group32+sr",
]  # fmt: skip


@pytest.mark.parametrize("text", EXAMPLES)
def test_text_is_canonical_and_inverse(text: str) -> None:
    spec = QuantSpec.parse(text)
    assert str(spec) == text
    assert QuantSpec.parse(spec.full()) == spec


@pytest.mark.parametrize(
    ("long", "short"),
    [("int8:row", "int8"), ("mxfp4:even+hadamard16", "mxfp4+hadamard16"), ("nf4:block64+dq", "nf4+dq"),
     ("mxfp8_e4m3:rceil", "mxfp8_e4m3"), ("int4:group128", "int4"), ("e4m3:tensor", "e4m3")],
)  # fmt: skip
def test_defaults(long: str, short: str) -> None:
    assert QuantSpec.parse(long) == QuantSpec.parse(short)
    assert str(QuantSpec.parse(long)) == short


@st.composite
def specs(draw: st.DrawFn) -> QuantSpec:
    form = FORMATS[draw(st.sampled_from(sorted(FORMATS)))]
    kind = draw(st.sampled_from(form.granularities))
    cols = 32 if form.name.startswith(("mxfp", "q8", "q4")) else draw(st.sampled_from([32, 64, 128]))
    gran = {"tensor": "tensor", "row": "row", "tile": f"{draw(st.sampled_from([1, 128]))}x{cols}"}.get(
        kind, f"{kind}{cols}"
    )
    granularity = Granularity.parse(gran)
    assert granularity is not None
    return QuantSpec(
        form.name,
        granularity,
        draw(st.sampled_from(form.rules)),
        draw(st.sampled_from(("none", *form.transforms))),
        form.double_quant and draw(st.booleans()),
        draw(st.sampled_from(["nearest", "stochastic"])) if form.stochastic else "nearest",
        draw(st.sampled_from(["dynamic", "delayed", "static"])) if form.delayed and kind == "tensor" else "dynamic",
        draw(st.sampled_from(["ocp", "fnuz"])) if form.name in ("e4m3", "e5m2") else "ocp",
    )


@given(specs())
def test_every_spec_survives_its_text(spec: QuantSpec) -> None:
    assert QuantSpec.parse(str(spec)) == spec


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("int9", "int8"),
        ("int8:rows", "granularities: tensor, row, blockN, groupN, RxC"),
        ("mxfp4:row", "granularities of mxfp4: blockN"),
        ("mxfp4:block16", "blocks of 32"),
        ("int8:floor", "rules: absmax, pow2"),
        ("int8+dq", "nf4"),
        ("nf4+sr", "'+sr' exists for"),
        ("int8+hadamard64", "suffixes:"),
        ("nf4+hadamard16", "transforms of nf4: none"),
        ("int8:block24+hadamard16", "multiples of 16"),
        ("e4m3:row+delayed", "per tensor"),
        ("int8+fnuz", "e4m3, e5m2"),
        ("int8:row:row", "twice"),
        ("int8+sr+sr", "twice"),
        ("int8:block0", "granularity"),
        ("", "int8:row"),
    ],
)
def test_refusals_name_what_exists(text: str, says: str) -> None:
    with pytest.raises(QuantError) as error:
        QuantSpec.parse(text)
    assert says in str(error.value)


def test_only_a_tensor_scale_or_a_square_tile_survives_a_transpose() -> None:
    survive = [t for t in ("int8:tensor", "int8", "int8:block32", "e4m3:128x128", "e4m3:1x128")
               if QuantSpec.parse(t).granularity.transposes]  # fmt: skip
    assert survive == ["int8:tensor", "e4m3:128x128"]


def test_recipe_table() -> None:
    """Exactly DESIGN's rows; each parses; those that cannot run say which format is missing."""
    assert list(recipes.RECIPES) == [
        "bf16", "int8", "int8-backward", "int8-smooth", "int8-weight-only", "fp8", "fp8-delayed", "fp8-rowwise",
        "fp8-blockwise", "mxfp8", "mxfp4", "nf4", "int4", "q8_0", "q4_0", "bitnet",
    ]  # fmt: skip
    ready = recipes.available()
    assert {name for name, why in ready.items() if not why} >= {"bf16", "int8", "int8-backward", "int8-weight-only"}
    for why in ready.values():
        assert not why or "not built in this version" in why
    policy = recipes.recipe("mxfp4")
    assert str(policy.spec("x", "weight", "forward")) == "mxfp4+hadamard16"
    for role, gemm in (("weight", "dgrad"), ("input", "wgrad"), ("grad_output", "dgrad"), ("grad_output", "wgrad")):
        spec = policy.spec("x", role, gemm)
        assert spec is not None and spec.rounding == "stochastic"
    backward = recipes.recipe("int8-backward")
    assert backward.spec("x", "weight", "forward") is None
    assert backward.spec("x", "weight", "dgrad") == QuantSpec.parse("int8:row")
    with pytest.raises(QuantError, match="int8-weight-only"):
        recipes.recipe("int8-weight-onyl")


def test_scale_group_shapes_never_come_from_counts() -> None:
    """A 128 × 128 weight has one tile; the scale is still tile-shaped."""
    from lumen.formats.groups import group_amax, scale_shape

    x = torch.randn(128, 128)
    for text in ("int8:tensor", "int8:row", "int8:block32", "e4m3:128x128", "e4m3:1x128"):
        gran = QuantSpec.parse(text).granularity
        assert tuple(group_amax(x, gran).shape) == scale_shape(x.shape, gran)
    assert scale_shape((128, 128), QuantSpec.parse("e4m3:128x128").granularity) == (1, 1)
