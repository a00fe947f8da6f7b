"""Checks of the machine. Not built yet."""
