"""Losses, and how loss tokens are counted."""
