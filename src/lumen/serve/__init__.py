"""OpenAI-compatible server. Not built yet."""
