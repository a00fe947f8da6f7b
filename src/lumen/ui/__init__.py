"""Web interface. Not built yet."""
