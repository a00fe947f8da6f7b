"""Kernels in C++ for CPUs: built on first use, cached, and called through a plain C interface (`library`)."""
