"""Meshes, sharding and quantised collectives. Not built yet."""
