"""Does this device compute what it should?  Products, attention and formats against fp64 on the CPU.

A product that is silently wrong on a chip shows as a model that learns badly, weeks later.  So every path that training
takes is run once on small random operands and compared, forward and backward:

* linear layer and causal attention in fp32, bf16 and fp16: both sides get the same rounded inputs, the reference
  computes in fp64;
* int8 and FP8 linear layers, as recipes run them: the reference multiplies in fp64 what the operands' codes stand for;
* quantising: the codes that the device makes are those that the CPU makes, bit for bit;
* the allocator: a block is written, copied to the host and back, and given back.

Two figures are judged: the relative error in the Frobenius norm, and the largest single deviation in units of the
result's root mean square, which finds one wrong element among thousands.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F

from lumen.core.errors import LumenError
from lumen.formats import QuantSpec
from lumen.kernels import target_of
from lumen.quant import quantize, quantize_tensor
from lumen.quant.gemm import through

DTYPES = ((torch.float32, 1e-4), (torch.bfloat16, 2e-2), (torch.float16, 4e-3))
"""Allowed relative error.  torch's CPU products reach 4e-7, 2.4e-3 and 3e-4 on these operands (measured), attention
backward a little more; the room above is for products that accumulate in another order."""

OUTLIER = {"attention": 20, "quantise": 8}
"""A single element may deviate so many times the allowed relative error, in units of the root mean square; 5 where
nothing is said.  Measured on the CPU: 0.8 for products, 7 for attention (early rows of V's gradient), 4 for formats."""

CODECS = ("int8:row", "e4m3:row", "mxfp8_e4m3", "nf4:block64", "int4:group128")

RECIPES = {
    "int8": ("int8", "int8:row", "int8:row", 6e-3),
    "fp8": ("fp8", "e4m3:tensor", "e5m2:tensor", 1.2e-2),
}
"""Probe → recipe, spec of weight and input, spec of the output's gradient, allowed error of a bf16 layer against fp64
of the very same codes (bf16 rounds results, and dequantised operands where the product is not native; measured on the
CPU: 1.7e-3 and 3.0e-3)."""

PATTERN_BYTES = 64 << 20


@dataclass(frozen=True)
class Measured:
    """One comparison: what, the larger of the two figures as a share of what is allowed, and both in words."""

    what: str
    share: float
    said: str

    @property
    def wrong(self) -> bool:
        """Whether it exceeds what is allowed; NaN does."""
        return not self.share <= 1


def compare(what: str, found: torch.Tensor, expected: torch.Tensor, allowed: float) -> Measured:
    """Judge `found` (any device and dtype) against `expected` (fp64, CPU) of the same shape."""
    difference = found.detach().double().cpu() - expected
    size = float(expected.norm()) or 1.0
    error = float(difference.norm()) / size
    outlier = float(difference.abs().max()) / (size / max(1.0, expected.numel() ** 0.5))
    share = max(error / allowed, outlier / (OUTLIER.get(what.split()[0], 5) * allowed))
    if error != error or outlier != outlier:
        share = float("nan")
    return Measured(
        what, share, f"{what}: relative error {error:.1e} of {allowed:.0e}, largest deviation {outlier:.1e}"
    )


def _with_gradients(function: Callable[..., torch.Tensor], inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Output and gradients for a fixed random upstream gradient."""
    inputs = [tensor.detach().requires_grad_() for tensor in inputs]
    output = function(*inputs)
    upstream = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(output)
    return [output.detach(), *torch.autograd.grad(output, inputs, upstream)]


def _products(name: str, device: str) -> Iterator[Measured]:
    for dtype, allowed in DTYPES:
        generator = torch.Generator().manual_seed(0)

        def normal(*shape: int, source: torch.Generator = generator) -> torch.Tensor:
            return torch.randn(shape, generator=source)

        function: Callable[..., torch.Tensor]
        cases: list[tuple[str, tuple[torch.Tensor, ...]]]
        if name == "gemm":
            cases = [("odd", (normal(96, 160), normal(130, 160))), ("aligned", (normal(256, 512), normal(384, 512)))]
            function = _linear
        else:
            cases = [("odd", tuple(normal(2, 4, 65, 64) for _ in range(3)))]
            cases.append(("aligned", tuple(normal(1, 2, 128, 64) for _ in range(3))))
            function = _attention
        for shape, inputs in cases:
            rounded = [tensor.to(dtype) for tensor in inputs]
            expected = _with_gradients(function, [tensor.double() for tensor in rounded])
            found = _with_gradients(function, [tensor.to(device) for tensor in rounded])
            short = str(dtype).removeprefix("torch.")
            for part, a, b in zip(("output", "dA", "dB", "dC"), found, expected, strict=False):
                yield compare(f"{name} {short} {shape} {part}", a, b, allowed)


def _linear(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return F.linear(x, w)


def _attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def gemm(device: str) -> Iterator[Measured]:
    """x·Wᵀ and both gradients."""
    return _products("gemm", device)


def attention(device: str) -> Iterator[Measured]:
    """Causal scaled-dot-product attention and its three gradients."""
    return _products("attention", device)


def codecs(device: str) -> Iterator[Measured]:
    """Codes made on the device equal the CPU's; on the CPU itself, values stay within the format's own error."""
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(2))
    limits = {"int8:row": 1.2e-2, "e4m3:row": 4e-2, "mxfp8_e4m3": 5e-2, "nf4:block64": 0.13, "int4:group128": 0.2}
    for name in CODECS:
        here = quantize_tensor(x, name)
        yield compare(f"quantise {name}", here.dequantize(), x.double(), limits[name])
        if device != "cpu":
            there = quantize_tensor(x.to(device), name)
            equal = torch.equal(there.codes.cpu().view(torch.uint8), here.codes.view(torch.uint8))
            yield Measured(f"quantise {name}", 0.0 if equal else float("inf"), f"{name}: codes differ from the CPU's")


def _quantised(name: str, device: str) -> Iterator[Measured]:
    recipe, forward_spec, backward_spec, allowed = RECIPES[name]
    generator = torch.Generator().manual_seed(3)
    x, dy = torch.randn(96, 160, generator=generator), torch.randn(96, 128, generator=generator)
    linear = torch.nn.Linear(160, 128, bias=False, dtype=torch.bfloat16)
    with torch.no_grad():
        linear.weight.copy_(torch.randn(128, 160, generator=generator) / 12)
    w, layer = linear.weight.detach().float().clone(), torch.nn.Sequential(linear)
    x, dy = x.bfloat16().float(), dy.bfloat16().float()
    quantize(layer.to(device), recipe, frozen=False)
    inputs = x.to(device, torch.bfloat16).requires_grad_()
    out = layer(inputs)
    out.backward(dy.to(device, torch.bfloat16))
    one, two = QuantSpec.parse(forward_spec), QuantSpec.parse(backward_spec)

    def codes(t: torch.Tensor, spec: QuantSpec, contract: int) -> torch.Tensor:
        return through(t, spec, contract, torch.float32).double()

    yield compare(f"{name} output", out, codes(x, one, 1) @ codes(w, one, 1).t(), allowed)
    assert inputs.grad is not None
    yield compare(f"{name} dgrad", inputs.grad, codes(dy, two, 1) @ codes(w, one, 0), allowed)
    gradient = next(p.grad for p in layer.parameters() if p.grad is not None)
    yield compare(f"{name} wgrad", gradient, codes(dy, two, 0).t() @ codes(x, one, 0), allowed)


def int8(device: str) -> Iterator[Measured]:
    """An int8 linear layer: forward, dgrad and wgrad."""
    return _quantised("int8", device)


def fp8(device: str) -> Iterator[Measured]:
    """An FP8 linear layer: forward, dgrad and wgrad."""
    return _quantised("fp8", device)


def allocator(device: str) -> Iterator[Measured]:
    """A block is written on the device, copied to the host and back, compared, and given back."""
    on_gpu = device != "cpu"
    before = torch.cuda.memory_allocated(device) if on_gpu else 0
    pattern = torch.arange(PATTERN_BYTES // 4, dtype=torch.int32)
    block = pattern.to(device, copy=True)
    block.mul_(-3)
    back = block.cpu().to(device, copy=True)
    same = torch.equal(back, block) and torch.equal(back.cpu(), pattern * -3)
    yield Measured("round trip", 0.0 if same else float("inf"), f"{PATTERN_BYTES >> 20} MiB to {device} and back")
    del block, back
    left = torch.cuda.memory_allocated(device) - before if on_gpu else 0
    yield Measured("given back", float(left > 0), f"{left} bytes stay allocated")


PROBES: dict[str, Callable[[str], Iterator[Measured]]] = {
    "gemm": gemm,
    "attention": attention,
    "quantise": codecs,
    "int8": int8,
    "fp8": fp8,
    "allocator": allocator,
}


def measure(probe: str, device: str) -> dict[str, Any]:
    """Run one probe: {probe, device, wrong: lines, worst: line of the largest share, count, error}.

    error is a short text where the probe could not run at all; nothing is raised for what the device does.
    """
    found: list[Measured] = []
    error = ""
    try:
        found = list(PROBES[probe](device))
    except (RuntimeError, LumenError, NotImplementedError, AssertionError) as failure:
        error = f"{type(failure).__name__}: {str(failure).splitlines()[0] if str(failure) else ''}"
    worst = max(found, key=lambda m: float("inf") if m.share != m.share else m.share, default=None)
    return {
        "probe": probe,
        "device": device,
        "target": target_of(device),
        "wrong": [m.said for m in found if m.wrong],
        "worst": worst.said if worst else "",
        "count": len(found),
        "error": error,
    }


def wrong_products(device: str) -> list[str]:
    """What is wrong with linear layer and attention on a device, as lines (for bench/gpu_check.py)."""
    return [m.said for probe in (gemm, attention) for m in probe(device) if m.wrong]
