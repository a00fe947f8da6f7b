"""200 mutated configurations: each is a clear LumenError or a valid run, never another exception.

Seeded, so a failure repeats. `LUMEN_FUZZ=20000` runs more of them.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from pathlib import Path

from lumen.config import FileConfig, dump, foreign_keys, load
from lumen.core import LumenError

FIXTURES = Path(__file__).parents[1] / "fixtures" / "configs"
BASES = [path.read_text(encoding="utf-8") for path in sorted(FIXTURES.glob("*.yaml"))]
BASES.append(
    "model_name_or_path: a\ndataset: [a, b]\nmix_strategy: interleave_under\ninterleave_probs: [0.5, 0.5]\n"
    "quant:\n  recipe: int8\n  gemms: [forward, dgrad]\n  rules:\n    - match: 'model.layers.0.*'\n      weight: none\n"
    "defaults: &d {x: 1}\nval_size: 0.1\neval_strategy: steps\n".replace("defaults: &d {x: 1}\n", "")
)
KEYS = [*FileConfig.model_fields, *foreign_keys()]
VALUES = [
    "null", "", "true", "no", "0", "-1", "1e-4", "1e400", ".nan", "-.inf", "9" * 400, "9" * 5000, "0x1F", "1_000",
    "010", "[]", "{}", "[1, [2, [3]]]", "{a: {b: c}}", "[null]", "[{match: 3}]", "'\\'", '"\\x"', "'", "日本語",
    "\u202e", "\ud7ff", "!!python/name:os.system", "!!binary x", "!!timestamp 9", "!!int x", "!!float ''", "!!bool 7",
    "!!set {a, b}", "!!omap [a: 1]", "!!str [a]", "*x", "&x a", "? a", "- a", "a: b: c", "|", ">\n  text", "<<",
    "2026-13-45", "12:30:45", "steps", "epoch", "lora", "full", "qlora", "dpo", "int8", "nf4", "cuda:99999", "auto",
    "a,b,,", ",", "None", "@at", "`tick`", "%dir", "x" * 10_000,
]  # fmt: skip


def set_value(rng: random.Random, text: str) -> str:
    lines = text.splitlines()
    i = rng.randrange(len(lines))
    lines[i] = f"{lines[i].partition(':')[0]}: {rng.choice(VALUES)}"
    return "\n".join(lines)


def add_key(rng: random.Random, text: str) -> str:
    return f"{text}\n{rng.choice(KEYS)}: {rng.choice(VALUES)}\n"


def misspell(rng: random.Random, text: str) -> str:
    key = rng.choice(KEYS)
    i = rng.randrange(len(key))
    return f"{text}\n{key[:i]}{rng.choice('xq_é')}{key[i + 1 :]}: 1\n"


def repeat_line(rng: random.Random, text: str) -> str:
    lines = text.splitlines()
    return "\n".join([*lines, rng.choice(lines)])


def cut(rng: random.Random, text: str) -> str:
    return text[: rng.randrange(len(text))]


def garble(rng: random.Random, text: str) -> str:
    i = rng.randrange(len(text))
    return (
        text[:i] + rng.choice(["\t", "\x00", "\x07", ":", "{", "[", "'", '"', "&", "*", "é", "\ufeff", "\n"]) + text[i:]
    )


def indent(rng: random.Random, text: str) -> str:
    lines = text.splitlines()
    i = rng.randrange(len(lines))
    return "\n".join([*lines[:i], *("  " + line for line in lines[i:])])


def swap(rng: random.Random, text: str) -> str:
    lines = text.splitlines()
    i, j = rng.randrange(len(lines)), rng.randrange(len(lines))
    first, _, a = lines[i].partition(":")
    second, _, b = lines[j].partition(":")
    lines[i], lines[j] = f"{first}:{b}", f"{second}:{a}"
    return "\n".join(lines)


def nest(rng: random.Random, text: str) -> str:
    section = rng.choice(["quant", "memory", "monitor", "rules", "hygiene", "distributed", rng.choice(KEYS)])
    return f"{section}:\n" + "\n".join("  " + line for line in text.splitlines())


def merge_key(rng: random.Random, text: str) -> str:
    return f"{text}\nquant: &q {{recipe: int8}}\n<<: {rng.choice(['*q', '[*q, *q]', '3', '{lora_rank: 4}', 'null'])}\n"


def deep(rng: random.Random, text: str) -> str:
    depth = rng.choice([50, 2000])
    return f"{text}\n{rng.choice(KEYS)}: {'[' * depth}{']' * depth}\n"


MUTATIONS: list[Callable[[random.Random, str], str]] = [
    set_value, set_value, set_value, add_key, add_key, misspell, repeat_line, cut, garble, indent, swap, nest,
    merge_key, deep,
]  # fmt: skip


def mutated(seed: int) -> tuple[bytes, list[str]]:
    """One file and its overrides."""
    rng = random.Random(seed)
    text = rng.choice(BASES)
    for _ in range(rng.choice([1, 1, 1, 2])):
        if text.strip():
            text = rng.choice(MUTATIONS)(rng, text)
    words = []
    for _ in range(rng.choice([0, 0, 0, 0, 1, 2])):
        key, value = rng.choice([*KEYS, "quant.recipe", "quant.rules", "a.b.c"]), rng.choice(VALUES)
        words += rng.choice([[f"{key}={value}"], [f"--{key}", value], [f"--{key}={value}"], [value]])
    data = text.encode("utf-8", "surrogatepass")
    if rng.random() < 0.05:
        i = rng.randrange(len(data) + 1)
        data = data[:i] + bytes([rng.randrange(256)]) + data[i:]
    return data, words


def test_a_mutated_configuration_is_an_error_or_a_run(tmp_path: Path) -> None:
    count = int(os.environ.get("LUMEN_FUZZ", "200"))
    path = tmp_path / "run.yaml"
    runs = 0
    for seed in range(count):
        data, words = mutated(seed)
        path.write_bytes(data)
        try:
            loaded = load(path, words)
        except LumenError as error:
            assert error.what.strip() and error.where, f"seed {seed}: an error without a place: {error!r}"
        except Exception as error:
            raise AssertionError(f"seed {seed}: {type(error).__name__}: {error}\n{data[-400:]!r} {words}") from error
        else:
            json.dumps(dump(loaded.run))
            runs += 1
    assert count // 10 < runs < count - count // 10, (
        f"{runs} of {count} still run: mutations are too weak or too strong"
    )
