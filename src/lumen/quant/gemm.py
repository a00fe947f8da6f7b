"""The three products of a linear layer with operands in low precision.

All are out = A·B with A [M, K] and B [K, N].  Two int8 operands with row or tensor scales go through the integer
product (kernels.int8).  Any other pair is computed as defined: quantise, dequantise, multiply in the compute dtype.

A frozen weight keeps one code set, W ≈ q·s with a scale per output n (NUMERICS).  Forward contracts over the input, so
s stays outside the sum.  dgrad contracts over n, along which s varies, so s is folded into the other operand first:

    dx[m, k] = Σ_n dy[m, n] · s[n] · q[n, k] = Σ_n (dy·s)[m, n] · q[n, k]

and dy·s is quantised per row instead of dy.  No second copy of the weight, in any precision, is needed.

A trainable weight has a master, from which each GEMM's operand is quantised along the dimension it contracts over.

dgrad's operand is made anew in every backward pass (`fresh`) where it is rounded stochastically, so that the errors of
micro-steps are independent, and where a frozen weight's codes are not what dgrad asks for: then from the values that
the codes stand for, which are the weight of that layer.
"""

from __future__ import annotations

import torch

from lumen.formats import QuantSpec, decode, encode
from lumen.formats.codec import scale_names
from lumen.kernels.int8 import int8_matmul, quantize_int8
from lumen.quant.live import NOTHING, Live
from lumen.quant.plan import GemmPlan, LayerPlan, is_int8

Codes = tuple[torch.Tensor, ...]
"""A weight [N, K] in codes: the codes, then the scales in the order of `formats.codec.scale_names`."""


def encode_operand(
    x: torch.Tensor, spec: QuantSpec, contract: int, role: str = "weight", live: Live = NOTHING
) -> Codes:
    """x [·, ·] in codes whose groups run along dimension `contract` (0 or 1).

    int8 with row or tensor scales keeps x's layout, as the integer product takes views; other formats encode the
    transpose where they contract over dimension 0.  role, live: whose random numbers stochastic rounding takes.
    """
    nearest = spec.rounding == "nearest"
    if nearest and spec.scaling == "dynamic" and is_int8(spec):
        return quantize_int8(x, contract if spec.granularity.kind == "row" else None, spec.rule)
    noise, scale = None if nearest else live.noise(role), live.scale(x, spec, role)
    codes, scales = encode(x if contract == 1 else x.t(), spec, noise=noise, nonfinite="mark", scale=scale)
    parts = (codes, *(scales[name] for name in scale_names(spec)))
    if is_int8(spec) and contract == 0:
        return tuple(part.t() for part in parts)
    return parts


def decode_operand(
    parts: Codes, spec: QuantSpec, shape: tuple[int, int], contract: int, dtype: torch.dtype
) -> torch.Tensor:
    """The values [shape] of `encode_operand`'s result in `dtype`."""
    if is_int8(spec):
        return (parts[0].float() * parts[1]).to(dtype)
    scales = dict(zip(scale_names(spec), parts[1:], strict=True))
    if contract == 1:
        return decode(parts[0], scales, spec, shape, dtype)
    return decode(parts[0], scales, spec, (shape[1], shape[0]), dtype).t()


def through(
    x: torch.Tensor,
    spec: QuantSpec | None,
    contract: int,
    dtype: torch.dtype,
    role: str = "weight",
    live: Live = NOTHING,
) -> torch.Tensor:
    """x [·, ·] after its round trip through the format, in `dtype`."""
    if spec is None:
        return x.to(dtype)
    parts = encode_operand(x, spec, contract, role, live)
    return decode_operand(parts, spec, (x.shape[0], x.shape[1]), contract, dtype)


def weight_codes(weight: torch.Tensor, plan: LayerPlan, live: Live = NOTHING) -> tuple[Codes, Codes]:
    """A master [N, K] in the codes of forward and of dgrad; an empty tuple where a GEMM takes no codes of its own."""
    forward, dgrad = plan.forward.right, plan.dgrad.right
    folded = weight if live.smooth is None else weight.float() * live.smooth
    first = encode_operand(folded, forward, 1, "weight", live) if forward else ()
    if dgrad is None or shares_codes(plan) or plan.fresh:
        return first, ()
    return first, encode_operand(weight, dgrad, 0, "weight", live)


def num_codes(spec: QuantSpec | None) -> int:
    """Tensors in which an operand of this spec is kept: the codes and what they are scaled with."""
    return 1 + len(scale_names(spec)) if spec else 0


def shares_codes(plan: LayerPlan) -> bool:
    """Whether dgrad reads forward's codes.

    A frozen weight has only these; so does a layer that is differentiated straight through its dequantised weight; and
    scales that stay valid under a transpose need no second set.
    """
    forward, dgrad = plan.forward.right, plan.dgrad.right
    if plan.fresh:
        return False
    if plan.stores_codes:
        return True
    if forward is None or forward != dgrad:
        return False
    return plan.dgrad.how == "dequantised" or forward.granularity.transposes


def forward_gemm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    codes: Codes,
    plan: LayerPlan,
    shape: tuple[int, int],
    live: Live = NOTHING,
) -> torch.Tensor:
    """x [M, K] → y [M, N] = x·Wᵀ in x's dtype; `codes` are forward's, `weight` the master where there is one.

    shape: (N, K), since packed codes do not show it.
    """
    gemm, dtype = plan.forward, x.dtype
    if live.smooth is not None:
        x = x.float() / live.smooth
        weight = None if weight is None else weight.float() * live.smooth
    if size := plan.groups("forward"):
        assert gemm.left is not None
        return _grouped_forward(encode_operand(x, gemm.left, 1, "input", live), codes, size, dtype)
    if gemm.how == "int8":
        assert gemm.left is not None
        qx, sx = encode_operand(x, gemm.left, 1, "input", live)
        return int8_matmul(qx, codes[0].t(), sx, codes[1].t() if codes[1].ndim else codes[1], dtype)
    if gemm.right is not None:
        dense = decode_operand(codes, gemm.right, shape, 1, dtype)
    else:
        assert weight is not None
        dense = weight.to(dtype)
    return through(x, gemm.left, 1, dtype, "input", live) @ dense.t()


def _grouped_forward(x: Codes, weight: Codes, size: int, dtype: torch.dtype) -> torch.Tensor:
    """Σ over the groups g of K: (sx[m, g] · sw[n, g]) · the integer product over g; summed in fp32."""
    (qx, sx), (qw, sw) = x, weight
    out = torch.zeros(qx.shape[0], qw.shape[0], dtype=torch.float32, device=qx.device)
    for g, start in enumerate(range(0, qx.shape[1], size)):
        part = slice(start, start + size)
        out += int8_matmul(qx[:, part], qw[:, part].t(), sx[:, g : g + 1], sw[:, g : g + 1].t(), torch.float32)
    return out.to(dtype)


def _grouped_dgrad(dy: torch.Tensor, codes: Codes, left: QuantSpec, size: int, live: Live) -> torch.Tensor:
    """dx group by group of K, with the group's scales of n folded into dy, as for one scale per row."""
    qw, sw = codes
    parts = []
    for g, start in enumerate(range(0, qw.shape[1], size)):
        qy, sy = encode_operand(dy * sw[:, g], left, 1, "grad_output", live)
        parts.append(int8_matmul(qy, qw[:, start : start + size], sy, None, dy.dtype))
    return torch.cat(parts, 1)


def dgrad_gemm(
    dy: torch.Tensor,
    weight: torch.Tensor | None,
    codes: Codes,
    plan: LayerPlan,
    shape: tuple[int, int],
    live: Live = NOTHING,
) -> torch.Tensor:
    """dy [M, N] → dx [M, K] = dy·W in dy's dtype.

    `codes` are dgrad's own, or forward's where they are shared or where the operand is made from them.
    """
    shared = shares_codes(plan)
    dx = _dgrad(dy, weight, codes, plan, shape, live)
    if live.smooth is not None and (shared or (plan.fresh and plan.stores_codes)):  # made from the codes of W·s
        dx = (dx.float() / live.smooth).to(dy.dtype)
    return dx


def _dgrad(
    dy: torch.Tensor, weight: torch.Tensor | None, codes: Codes, plan: LayerPlan, shape: tuple[int, int], live: Live
) -> torch.Tensor:
    gemm, shared = plan.dgrad, shares_codes(plan)
    if (size := plan.groups("dgrad")) and shared:
        assert gemm.left is not None
        return _grouped_dgrad(dy, codes, gemm.left, size, live)
    if plan.fresh:
        assert gemm.right is not None
        if codes:
            assert plan.forward.right is not None
            weight = decode_operand(codes, plan.forward.right, shape, 1, torch.float32)
        assert weight is not None
        codes = encode_operand(weight, gemm.right, 0, "weight", live)
    if gemm.how == "int8":
        assert gemm.left is not None
        if shared:  # forward's codes carry a scale per n, the dimension contracted here
            folded = dy * codes[1].reshape(1, -1) if codes[1].ndim else dy
            qy, sy = encode_operand(folded, gemm.left, 1, "grad_output", live)
            return int8_matmul(qy, codes[0], sy, None if codes[1].ndim else codes[1], dy.dtype)
        qy, sy = encode_operand(dy, gemm.left, 1, "grad_output", live)
        return int8_matmul(qy, codes[0], sy, codes[1], dy.dtype)
    if codes:
        spec = plan.forward.right if shared else gemm.right
        assert spec is not None
        dense = decode_operand(codes, spec, shape, 1 if shared else 0, dy.dtype)
    else:
        assert weight is not None
        dense = weight.to(dy.dtype)
    return through(dy, gemm.left, 1, dy.dtype, "grad_output", live) @ dense


def wgrad_gemm(
    dy: torch.Tensor, x: torch.Tensor, gemm: GemmPlan, dtype: torch.dtype, live: Live = NOTHING
) -> torch.Tensor:
    """dy [M, N], x [M, K] → dW [N, K] = dyᵀ·x in `dtype`; both operands are quantised along M.

    Where dy stays in high precision, x keeps forward's groups along K: what is differentiated is what forward computed.
    """
    if dy.shape[0] == 0:
        return dy.new_zeros(dy.shape[1], x.shape[1], dtype=dtype)
    if gemm.how == "int8":
        assert gemm.left is not None and gemm.right is not None
        qy, sy = encode_operand(dy, gemm.left, 0, "grad_output", live)
        qx, sx = encode_operand(x, gemm.right, 0, "input", live)
        return int8_matmul(qy.t(), qx, sy.t() if sy.ndim else sy, sx, dtype)
    left = through(dy, gemm.left, 0, dy.dtype, "grad_output", live)
    right = through(x, gemm.right, 0 if gemm.left else 1, dy.dtype, "input", live)
    return (left.t() @ right).to(dtype)
