"""Keep an optional package that is broken from breaking what does not need it.

PEFT imports bitsandbytes as soon as it is installed, to find out whether a layer is one of its own.  A build that does
not fit the GPU driver raises while it is imported (`libbitsandbytes_rocm82.so not found`), and plain LoRA would fail
for a package that it never uses.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_PACKAGE = "bitsandbytes"


@contextmanager
def without_bitsandbytes(model: Any) -> Iterator[None]:
    """Inside the block bitsandbytes counts as not installed, unless it is loaded or the model has layers of it."""
    if _PACKAGE in sys.modules or any(type(m).__module__.startswith(_PACKAGE) for m in model.modules()):
        yield
        return
    from peft.import_utils import is_bnb_4bit_available, is_bnb_available

    caches = (is_bnb_available, is_bnb_4bit_available)
    for cached in caches:
        cached.cache_clear()
    sys.modules[_PACKAGE] = None  # type: ignore[assignment]  # Python's own way to say "cannot be imported"
    try:
        yield
    finally:
        del sys.modules[_PACKAGE]
        for cached in caches:
            cached.cache_clear()
