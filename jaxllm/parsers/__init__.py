"""Parse a model's output into reasoning, text and tool calls."""
