"""Measurements that ship with the package. Not built yet."""
