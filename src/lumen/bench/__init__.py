"""Measurements that ship with the package: what a claim of the documentation rests on can be run again.

`lumen bench NAME` runs `main(argv) -> int` of the module `lumen.bench.NAME.command`.
"""

BENCHES = {
    "numerics": "every figure of the number formats beside its published value, and bit-equality with other packages",
}
"""Name → one line."""
