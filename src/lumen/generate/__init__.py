"""Sampling with a KV cache; used by training samples, chat and eval."""
