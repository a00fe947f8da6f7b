"""Measurements that ship with the package: what a claim of the documentation rests on can be run again.

`lumen bench NAME` runs `main(argv) -> int` of the module `lumen.bench.NAME.command` (`-` in a name is `_` there).
"""

BENCHES = {
    "numerics": "every figure of the number formats beside its published value, and bit-equality with other packages",
    "loss-gap": "what each recipe costs in held-out loss against bf16, beside an independent implementation",
}
"""Name → one line."""
