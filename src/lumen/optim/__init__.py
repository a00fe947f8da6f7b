"""Optimizers, all on one functional step; later low-bit states and gradient compressors."""
