"""Causal attention by the C++ kernel: bf16 in and out, softmax in fp32, what lies between examples never computed.

The mathematics and the layout are told in `csrc/attention.cpp`; `kernels.reference.attention` defines the result.
Two custom operators, forward and backward, so that compile sees each whole; the forward returns the output as
[B, T, H, D], which is how the output projection reads it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lumen.kernels.cpu.library import Float, Pointer, load, missing, numbers
from lumen.kernels.reference.attention import causal_attention
from lumen.kernels.registry import Kernel, record, register

MAX_SIZE = 256
"""Largest head size; a head's size must be a multiple of 16."""


def fits(query: Tensor, value: Tensor, softcap: float | None) -> bool:
    """Whether the kernel takes this attention, by device, dtype and shape alone (a compiler can follow it)."""
    size = query.shape[-1]
    right = query.device.type == "cpu" and query.dtype == torch.bfloat16 and value.dtype == torch.bfloat16
    return right and size % 16 == 0 and size <= MAX_SIZE and value.shape[-1] == size and softcap is None


def native_attention(
    query: Tensor, key: Tensor, value: Tensor, segment_ids: Tensor | None, *, scale: float, window: int | None = None
) -> Tensor:
    """Attention output [B, T, H, D] in bf16; differentiable in query, key and value.

    query [B, H, T, D], key and value [B, G, T, D] with H a multiple of G, bf16, any strides.
    segment_ids [B, T] integers: equal inside an example, whose tokens lie side by side; None: one example a row.
    """
    segments = None if segment_ids is None else segment_ids.to(torch.int32)
    out: Tensor = torch.ops.lumen.cpu_attention(query, key, value, segments, scale, window or 0)[0]
    return out


def _dense(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _sizes(query: Tensor, key: Tensor, window: int) -> Any:
    batch, heads, length, size = query.shape
    return numbers([batch, heads, key.shape[1], length, size, window])


def _strides(*tensors: Tensor) -> Any:
    return numbers([stride for tensor in tensors for stride in tensor.stride()[:3]])


def _segments(segments: Tensor | None) -> tuple[Tensor | None, int]:
    if segments is None:
        return None, 0
    dense = segments.contiguous()
    return dense, dense.data_ptr()


@torch.library.custom_op("lumen::cpu_attention", mutates_args=(), device_types="cpu")
def _forward(
    query: Tensor, key: Tensor, value: Tensor, segments: Tensor | None, scale: float, window: int
) -> tuple[Tensor, Tensor]:
    record("attention", "bf16", "cpu")
    query, key, value = _dense(query), _dense(key), _dense(value)
    batch, heads, length, size = query.shape
    out = torch.empty(batch, length, heads, size, dtype=query.dtype)
    log_sums = torch.empty(batch, heads, length, dtype=torch.float32)
    held, at = _segments(segments)
    run = load().lumen_attention_forward
    run.argtypes = [*[Pointer] * 8, Float]
    run(
        query.data_ptr(), key.data_ptr(), value.data_ptr(), out.data_ptr(), log_sums.data_ptr(), at,
        _sizes(query, key, window), _strides(query, key, value, out.transpose(1, 2)), scale,
    )  # fmt: skip
    del held
    return out, log_sums


@_forward.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, segments: Tensor | None, scale: float, window: int) -> Any:
    batch, heads, length, size = query.shape
    log_sums = query.new_empty(batch, heads, length, dtype=torch.float32)
    return query.new_empty(batch, length, heads, size), log_sums


@torch.library.custom_op("lumen::cpu_attention_backward", mutates_args=(), device_types="cpu")
def _backward(
    query: Tensor, key: Tensor, value: Tensor, out: Tensor, log_sums: Tensor, grad: Tensor, segments: Tensor | None,
    scale: float, window: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    query, key, value, grad, out = (_dense(x) for x in (query, key, value, grad, out))
    batch, heads, length, size = query.shape
    d_query = torch.empty(batch, length, heads, size, dtype=query.dtype)
    d_key, d_value = (torch.empty(batch, length, key.shape[1], size, dtype=query.dtype) for _ in range(2))
    held, at = _segments(segments)
    views = [query, key, value, *(x.transpose(1, 2) for x in (out, grad, d_query, d_key, d_value))]
    run = load().lumen_attention_backward
    run.argtypes = [*[Pointer] * 12, Float]
    run(
        *(view.data_ptr() for view in views), log_sums.data_ptr(), at,
        _sizes(query, key, window), _strides(*views), scale,
    )  # fmt: skip
    del held
    return d_query, d_key, d_value


@_backward.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> Any:
    batch, heads, length, size = query.shape
    shape = batch, length, key.shape[1], size
    return query.new_empty(batch, length, heads, size), key.new_empty(shape), key.new_empty(shape)


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    query, key, value, segments, ctx.scale, ctx.window = inputs
    ctx.save_for_backward(query, key, value, *output, *(() if segments is None else (segments,)))
    ctx.mark_non_differentiable(output[1])


def _differentiate(ctx: Any, grad: Tensor, _: Any) -> Any:
    query, key, value, out, log_sums, *rest = ctx.saved_tensors
    grads = torch.ops.lumen.cpu_attention_backward(
        query, key, value, out, log_sums, grad, rest[0] if rest else None, ctx.scale, ctx.window
    )
    return (*(g.transpose(1, 2) for g in grads), None, None, None)


torch.library.register_autograd("lumen::cpu_attention", _differentiate, setup_context=_keep)

register(
    Kernel(
        "attention", "reference", ("*",), ("bf16", "fp16", "fp32"), 0, "emulated",
        "plain torch in causal blocks, made for a compiler; what the others are tested against", causal_attention,
    )
)  # fmt: skip
register(
    Kernel(
        "attention", "cpu", ("cpu",), ("bf16",), 20, "native",
        "C++ with AVX512-BF16: causal, packed, grouped heads, windows; head sizes that are multiples of 16",
        native_attention, missing,
    )
)  # fmt: skip
