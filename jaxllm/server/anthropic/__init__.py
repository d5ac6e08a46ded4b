"""Anthropic's Messages, translated to chat completions."""
