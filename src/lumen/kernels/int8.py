"""INT8 GEMM: quantise two operands, multiply integers, scale the sums.

For out = A·B with A [M, K] and B [K, N], a scale can be taken out of the sum over K only if it does not vary along K:

    out[m, n] = Σ_k (qa[m, k]·sa[m]) · (qb[k, n]·sb[n]) = sa[m] · sb[n] · Σ_k qa[m, k]·qb[k, n]

so each operand is scaled per index that is *not* contracted, and the inner sum is exact in int32.  Three steps, each a
function here: `quantize_int8` (one scale per row, or per column), `lumen::int8_mm` (the integer product, a custom
operator, so that compile and export see it whole), and the scaling of its result, which a compiler fuses with what
follows.
"""

from __future__ import annotations

import functools

import torch

from lumen.formats.integer import MAX
from lumen.formats.scales import absmax_scale
from lumen.hardware import probe
from lumen.kernels.reference import int8 as reference
from lumen.kernels.registry import Kernel, record, register, select, target_of

_BLOCK = 1 << 21
"""Sums per block of the eager product: bounds the int32 and fp32 temporaries to 16 MB (8192 × 11008 would take 720)."""


def quantize_int8(x: torch.Tensor, dim: int | None, rule: str = "absmax") -> tuple[torch.Tensor, torch.Tensor]:
    """x [M, K] float → (codes int8 [M, K], scale fp32), one scale per slice along `dim`, the contracted dimension.

    dim 1 gives scale [M, 1], dim 0 gives [1, K], None gives [] (one for the tensor).  Bit-equal to the codec (nearest
    even), in as few passes over x as eager torch can; compiled, it is one read for the magnitude and one for the codes.
    NaN and Inf leave a NaN scale, so the product shows them.
    """
    if x.numel() == 0:
        amax = torch.zeros(_scale_shape(x, dim), dtype=torch.float32, device=x.device)
    else:
        amax = x.abs().amax() if dim is None else x.abs().amax(dim=dim, keepdim=True)
    scale = absmax_scale(amax.float(), MAX["int8"], rule=rule)
    return x.to(torch.float32, copy=True).div_(scale).round_().to(torch.int8), scale


def _scale_shape(x: torch.Tensor, dim: int | None) -> list[int]:
    return [] if dim is None else [1 if d == dim else n for d, n in enumerate(x.shape)]


def int8_matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """a [M, K] int8, b [K, N] int8, a_scale [M, 1] or [], b_scale [1, N] or [] or None, fp32 → [M, N] in `dtype`.

    Either operand may be a transposed view.
    """
    if torch.compiler.is_compiling() or a.shape[0] * b.shape[1] <= _BLOCK:
        sums = int8_mm(a, b) * a_scale
        return (sums if b_scale is None else sums.mul_(b_scale)).to(dtype)
    out = torch.empty(a.shape[0], b.shape[1], dtype=dtype, device=a.device)
    step = max(256, _BLOCK // b.shape[1])
    for start in range(0, a.shape[0], step):
        rows = slice(start, start + step)
        sums = int8_mm(a[rows], b) * (a_scale[rows] if a_scale.ndim else a_scale)
        out[rows] = sums if b_scale is None else sums.mul_(b_scale)
    return out


@torch.library.custom_op("lumen::int8_mm", mutates_args=())
def int8_mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a [M, K] int8 times b [K, N] int8 → int32 [M, N], exact; the kernel is chosen by the device's architecture."""
    kernel = select("int8_matmul", target_of(a.device), "int8")
    record("int8_matmul", "int8", kernel.backend)
    out: torch.Tensor = kernel.run(a, b)
    return out


@int8_mm.register_fake
def _(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a.new_empty(a.shape[0], b.shape[1], dtype=torch.int32)


def _torch_cpu(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch._int_mm(_plain_strides(a), _plain_strides(b))


def _plain_strides(x: torch.Tensor) -> torch.Tensor:
    """A transposed view of extent 1 has strides that torch 2.13 reads the wrong way round (measured: wrong sums)."""
    return x.clone(memory_format=torch.contiguous_format) if 1 in x.shape else x


def _torch_cuda(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """cuBLASLt and hipBLASLt want more than 16 rows and multiples of 8: pad with zeros, which add nothing."""
    m, k, n = a.shape[0], a.shape[1], b.shape[1]
    rows, inner, cols = max(0, 17 - m), -k % 8, -n % 8
    if rows or inner:
        a = torch.nn.functional.pad(a, (0, inner, 0, rows))
    if cols or inner:
        b = torch.nn.functional.pad(b, (0, cols, 0, inner))
    return torch._int_mm(a, b)[:m, :n]


register(
    Kernel(
        "int8_matmul", "reference", ("*",), ("int8",), 0, "emulated",
        "exact integer sums through fp32; what the others are tested against", reference.int8_matmul,
    )
)  # fmt: skip


@functools.cache
def _no_dot_products() -> str:
    """Why this machine's cores have no int8 dot products; empty where they have."""
    cpu = probe().cpu
    return "" if cpu.int8 else f"{cpu.model} shows none of avx512_vnni, avx_vnni, amx_int8, i8mm"


register(
    Kernel(
        "int8_matmul", "torch", ("cpu",), ("int8",), 10, "native",
        "torch._int_mm on oneDNN with the cores' int8 dot products (VNNI, AMX), about twice the bf16 rate", _torch_cpu,
        lambda: _no_dot_products(),
    )
)  # fmt: skip
register(
    Kernel(
        "int8_matmul", "torch-wide", ("cpu",), ("int8",), 5, "emulated",
        "torch._int_mm on cores without int8 dot products: the same sums in wider integers, no faster than bf16",
        _torch_cpu,
    )
)  # fmt: skip
register(
    Kernel(
        "int8_matmul", "torch", ("gfx90a", "gfx942", "gfx950", "gfx11*", "gfx12*", "sm_8*", "sm_9*", "sm_1*"),
        ("int8",), 10, "native", "torch._int_mm on hipBLASLt or cuBLASLt, padded to their multiples of 8", _torch_cuda,
    )
)  # fmt: skip
