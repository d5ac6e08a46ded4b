"""Cohere's chat, translated to chat completions."""
