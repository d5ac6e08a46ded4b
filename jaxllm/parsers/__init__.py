"""Parsers take a model's output apart: what it reasons, what it says, and the tools that it calls."""
