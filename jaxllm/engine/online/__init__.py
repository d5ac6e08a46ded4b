"""Streams on an event loop: what `AsyncLLM` is made of."""
