"""Held-out loss, before/after generations, comparison of runs."""
