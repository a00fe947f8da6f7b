"""Merge, and the formats that engines load."""
