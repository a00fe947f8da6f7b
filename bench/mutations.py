"""Tests that can fail: break the source as others once did, on a copy, and see the named test fail.

    python bench/mutations.py                       `make mutations`

Every row is one of the mistakes of tests/numerics/test_mistakes*.py.  All must pass on the copy as it is; then each
break is made alone, the test that guards it is run, and a test that still passes is an error: exit status 1.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LAYERS, MODELS = "tests/numerics/test_mistakes.py", "tests/numerics/test_mistakes_models.py"


@dataclass(frozen=True)
class Mutation:
    """edits: (file below src/lumen, text as it is, text as it is broken), each found exactly once."""

    number: int
    what: str
    edits: tuple[tuple[str, str, str], ...]
    test: str


_SAVE_WIDE = """wide = gemm.decode_operand(forward, plan.forward.right, (out_features, x.shape[1]), 1, x.dtype)
        ctx.save_for_backward(*kept, *saved, *dense, *back, wide)"""

MUTATIONS = (
    Mutation(
        1,
        "a zero group gets scale 0",
        (
            (
                "formats/scales.py",
                "scale = torch.where(scale < torch.finfo(torch.float32).tiny, torch.ones_like(scale), scale)",
                "scale = scale * 1",
            ),
        ),
        f"{LAYERS}::test_mistake_01_a_zero_group_is_zero_and_not_nan[int8]",
    ),
    Mutation(
        3,
        "the left operand's scale is used for the right one too",
        (
            (
                "kernels/int8.py",
                "return (sums if b_scale is None else sums.mul_(b_scale)).to(dtype)",
                "return (sums if b_scale is None else sums.mul_(a_scale.mean())).to(dtype)",
            ),
        ),
        f"{LAYERS}::test_mistake_03_each_operand_has_its_own_scale[int8]",
    ),
    Mutation(
        4,
        "FNUZ by capability number: 9.x is gfx942 and Hopper alike",
        (
            (
                "hardware/architectures.py",
                'return (found.fp8 if found else None) or "ocp"',
                'return "fnuz" if found and found.name.startswith(("gfx94", "sm_9")) else "ocp"',
            ),
        ),
        f"{LAYERS}::test_mistake_04_the_dialect_follows_the_architectures_name",
    ),
    Mutation(
        7,
        "the cached codes of a weight outlive optimizer.step()",
        (("quant/linear.py", "if owner() is master and seen == state:", "if owner() is master:"),),
        f"{LAYERS}::test_mistake_07_codes_follow_the_optimizer[int8-AdamW]",
    ),
    Mutation(
        8,
        "the cache is keyed by address",
        (
            (
                "quant/linear.py",
                "if owner() is master and seen == state:",
                "if self.__dict__.get('address') == master.data_ptr() and seen[1:] == state[1:]:",
            ),
            (
                "quant/linear.py",
                "self._cache = ((weakref.ref(master), state), codes)",
                "self._cache = ((weakref.ref(master), state), codes)\n        self.address = master.data_ptr()",
            ),
        ),
        f"{LAYERS}::test_mistake_08_no_cache_is_keyed_by_address",
    ),
    Mutation(
        9,
        "globs match prefixes, so layers.1 reaches layers.10",
        (
            (
                "quant/policy.py",
                'self.gemm in (gemm, "*") and fnmatchcase(module, self.match)',
                'self.gemm in (gemm, "*") and module.startswith(self.match.rstrip("*."))',
            ),
        ),
        f"{MODELS}::test_mistake_09_layers_1_is_not_layers_10",
    ),
    Mutation(
        14,
        "autograd keeps the dequantised weight",
        (
            (
                "quant/products.py",
                "ctx.save_for_backward(*kept, *saved, *dense, *back)",
                _SAVE_WIDE,
            ),
            ("quant/products.py", "kept = ctx.saved_tensors  #", "kept = ctx.saved_tensors[:-1]  #"),
        ),
        f"{LAYERS}::test_mistake_14_autograd_keeps_codes_and_no_dense_copy[nf4]",
    ),
    Mutation(
        18,
        "the hybrid recipe's gradients are E4M3",
        (
            (
                "quant/recipes.py",
                'Recipe("fp8", "e4m3:tensor", "e4m3:tensor", "e5m2:tensor", GEMMS',
                'Recipe("fp8", "e4m3:tensor", "e4m3:tensor", "e4m3:tensor", GEMMS',
            ),
        ),
        f"{LAYERS}::test_mistake_18_hybrid_fp8_is_e5m2_in_backward",
    ),
    Mutation(
        20,
        "the scale of fp16 gradients is computed in fp16",
        (("formats/scales.py", "scale = amax / type_max\n", "scale = (amax.half() / type_max).float()\n"),),
        f"{LAYERS}::test_mistake_20_fp16_gradients_do_not_overflow_their_scale[2e-07-fp8-rowwise]",
    ),
)


def apply(mutation: Mutation, root: Path) -> None:
    """Break the source below `root`.  Raises ValueError where a text is not there exactly once."""
    for name, before, after in mutation.edits:
        path = root / "src" / "lumen" / name
        text = path.read_text(encoding="utf-8")
        if text.count(before) != 1:
            raise ValueError(f"mistake {mutation.number}: {text.count(before)} times in {name}: {before}")
        path.write_text(text.replace(before, after), encoding="utf-8")


def copy(root: Path) -> Path:
    """The source and the tests, below a new folder."""
    for name in ("src", "tests", "bench"):
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__", "envs", "results"))
    shutil.copy(ROOT / "pyproject.toml", root)
    return root


def run(root: Path, *tests: str) -> tuple[int, str]:
    """pytest's exit status and the first line of the first error."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "--no-header", "--tb=short", "-p", "no:cacheprovider", *tests]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
    found = re.findall(r"^E +(\S.*)", done.stdout, re.MULTILINE) or re.findall(
        r": (\w*(?:Error|assert).*)", done.stdout
    )
    return done.returncode, found[0][:100] if found else ""


def main() -> int:
    parser = argparse.ArgumentParser(description="Break the source on a copy; the named tests must fail.")
    parser.add_argument("numbers", nargs="*", type=int, help="mistakes (default: all)")
    chosen = parser.parse_args().numbers
    mutations = [m for m in MUTATIONS if not chosen or m.number in chosen]
    survivors = 0
    with tempfile.TemporaryDirectory() as folder:
        whole = copy(Path(folder) / "whole")
        status, line = run(whole, *(m.test for m in mutations))
        print(f"as it is: {len(mutations)} tests {'fail: ' + line if status else 'pass'}", flush=True)
        if status:
            return 1
        for mutation in mutations:
            start = time.monotonic()
            broken = Path(shutil.copytree(whole, Path(folder) / f"broken-{mutation.number}"))
            apply(mutation, broken)
            status, line = run(broken, mutation.test)
            caught = status == 1  # 0: it passed; 2 and more: pytest itself could not run
            survivors += not caught
            print(f"mistake {mutation.number:>2}: {mutation.what}")
            print(f"            {mutation.test.partition('::')[2]}: {'fails' if caught else 'STILL PASSES'}: {line} "
                  f"({time.monotonic() - start:.0f} s)", flush=True)  # fmt: skip
            shutil.rmtree(broken)
    print(f"{len(mutations)} breaks, {len(mutations) - survivors} caught")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
