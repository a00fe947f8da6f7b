"""Loads RunConfig: YAML with line numbers, overrides, suggestions, the table of foreign keys."""
