"""Every number format: its spec and its reference codec in plain torch. The definition that kernels must match."""
