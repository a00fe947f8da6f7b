"""The registry (backends as data) and reference/, the plain-torch twins of every faster kernel."""

from lumen.kernels.cpu import attention as _attention  # noqa: F401  registers its kernels
from lumen.kernels.cpu import linear as _linear  # noqa: F401  likewise
from lumen.kernels.cpu import loss as _loss  # noqa: F401  likewise
from lumen.kernels.int8 import int8_matmul, quantize_int8
from lumen.kernels.registry import Kernel, register, select, table, target_of, trace

__all__ = ["Kernel", "int8_matmul", "quantize_int8", "register", "select", "table", "target_of", "trace"]
