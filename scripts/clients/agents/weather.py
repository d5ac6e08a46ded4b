"""The tool of the agents, and the question that they get."""

from __future__ import annotations

QUESTION = "What is the weather in Ulm?"
RESULT = "21 degrees and sunny"
ANSWER = "It is 21 degrees in Ulm."
"""The replayed model's answer after the tool's result."""
asked: list[str] = []
"""The cities that the tool was called with."""


def get_weather(city: str) -> str:
    """Say how the weather is in a city."""
    asked.append(city)
    return RESULT


SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 40}},
    "required": ["city"],
    "additionalProperties": False,
}


def check_called(mode: str) -> None:
    """Check that the tool was called: with the replayed city, or, by a model under a grammar, with any."""
    assert asked, "the tool was not called"
    assert mode != "replayed" or asked == ["Ulm"], asked
    asked.clear()
