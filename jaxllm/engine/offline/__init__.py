"""The synchronous engine, and the calls of `LLM` on it."""
