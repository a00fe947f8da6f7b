"""INT8 against bf16 in one linear layer: GEMM, quantising, and a whole training step of the layer.

    python bench/int8_linear.py [--rows 1024] [--repeats 30] [--threads 1] [--no-compile]

Prints the best of `--repeats` runs in milliseconds of processor time, for SmolLM2-135M's four shapes.  The best, and
processor time instead of the clock, because others on a shared machine only ever make things slower.  With more than
one thread the clock is used.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from torch import nn

from lumen.kernels.int8 import int8_matmul, quantize_int8
from lumen.quant import quantize

SHAPES = [(576, 576), (192, 576), (1536, 576), (576, 1536)]


def best(run: Callable[[], object], repeats: int) -> float:
    """Milliseconds of the fastest call."""
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    for _ in range(4):
        run()
    times = []
    for _ in range(repeats):
        start = clock()
        run()
        times.append(clock() - start)
    return min(times) * 1e3


def step(layer: nn.Module, x: torch.Tensor, dy: torch.Tensor) -> Callable[[], object]:
    def run() -> None:
        x.grad = None
        for p in layer.parameters():
            p.grad = None
        layer(x).backward(dy)

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--no-compile", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    print(f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}, {args.threads} threads, ms")

    print(
        "\n| N × K | bf16 GEMM | int8 GEMM | int8 + scale | quantise rows | quantise columns |\n" + "| --- " * 6 + "|"
    )
    for n, k in SHAPES:
        x, w = torch.randn(args.rows, k).bfloat16(), torch.randn(n, k).bfloat16()
        (qx, sx), (qw, sw) = quantize_int8(x, 1), quantize_int8(w, 1)
        cells = [
            best(lambda: nn.functional.linear(x, w), args.repeats),  # noqa: B023
            best(lambda: torch._int_mm(qx, qw.t()), args.repeats),  # noqa: B023
            best(lambda: int8_matmul(qx, qw.t(), sx, sw.t(), torch.bfloat16), args.repeats),  # noqa: B023
            best(lambda: quantize_int8(x, 1), args.repeats),  # noqa: B023
            best(lambda: quantize_int8(x, 0), args.repeats),  # noqa: B023
        ]
        print(f"| {n} × {k} | " + " | ".join(f"{c:.2f}" for c in cells) + " |")

    modes = ["eager"] if args.no_compile else ["eager", "compiled"]
    for frozen in (True, False):
        what = "frozen weight: forward + dgrad" if frozen else "trained weight: forward + dgrad + wgrad"
        print(f"\n{what}\n\n| N × K | " + " | ".join(f"{r} {m}" for m in modes for r in ("bf16", "int8")) + " |")
        print("| --- " * (1 + 2 * len(modes)) + "|")
        for n, k in SHAPES:
            cells = []
            for mode in modes:
                for recipe in ("bf16", "int8"):
                    torch._dynamo.reset()
                    layer = nn.Sequential(nn.Linear(k, n, bias=False, dtype=torch.bfloat16)).requires_grad_(not frozen)
                    quantize(layer, recipe)
                    run = layer if mode == "eager" else torch.compile(layer)
                    x = torch.randn(args.rows, k).bfloat16().requires_grad_(True)
                    cells.append(best(step(run, x, torch.randn(args.rows, n).bfloat16()), args.repeats))
            print(f"| {n} × {k} | " + " | ".join(f"{c:.2f}" for c in cells) + " |")


if __name__ == "__main__":
    main()
