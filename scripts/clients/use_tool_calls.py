"""Make 200 required tool calls with openai's client, 64 at a time, at temperature 1: use_tool_calls.py URL KEY.

Each call must be of a tool of the request, with arguments that match its schema; the exit status is 0 if all are.
"""

from __future__ import annotations

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema
import openai

NUM_CALLS, NUM_AT_ONCE = 200, 64
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 40},
        "days": {"type": "integer", "minimum": 1, "maximum": 14},
        "units": {"enum": ["celsius", "fahrenheit"]},
    },
    "required": ["city", "units"],
    "additionalProperties": False,
}
BOOK = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "maxLength": 60},
        "authors": {"type": "array", "items": {"type": "string", "maxLength": 40}, "minItems": 1, "maxItems": 3},
        "lent": {"type": "boolean"},
    },
    "required": ["title", "authors", "lent"],
    "additionalProperties": False,
}
SCHEMAS: dict[str, dict[str, Any]] = {"get_weather": WEATHER, "add_book": BOOK}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "description": f"Use {name}.", "parameters": schema}}
    for name, schema in SCHEMAS.items()
]


def call(client: openai.OpenAI, number: int) -> str | None:
    """Ask for a call, streamed every other time; return what is wrong with it, or None."""
    arguments: dict[str, Any] = {
        "model": "smollm2",
        "messages": [{"role": "user", "content": f"Number {number}: how is the weather, or which book is new?"}],
        "tools": TOOLS,
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "temperature": 1.0,
        "seed": number,
        "max_tokens": 400,
    }
    if number % 2:
        name, text, reason = "", "", None
        for chunk in client.chat.completions.create(**arguments, stream=True):
            for delta in chunk.choices[0].delta.tool_calls or []:
                name += delta.function.name or ""
                text += delta.function.arguments or ""
            reason = chunk.choices[0].finish_reason or reason
    else:
        choice = client.chat.completions.create(**arguments).choices[0]
        [call] = choice.message.tool_calls
        name, text, reason = call.function.name, call.function.arguments, choice.finish_reason
    try:
        jsonschema.validate(json.loads(text), SCHEMAS[name])
    except (KeyError, ValueError, jsonschema.ValidationError) as error:
        return f"{number}: {name} {text!r}: {error!r}"
    return None if reason == "tool_calls" else f"{number}: ended with {reason}"


def main() -> int:
    """Make the calls; returns the exit status."""
    url, key = sys.argv[1:]
    client = openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=600)
    with ThreadPoolExecutor(NUM_AT_ONCE) as pool:
        wrong = [each for each in pool.map(lambda number: call(client, number), range(NUM_CALLS)) if each]
    print("\n".join(wrong))
    print(f"{NUM_CALLS - len(wrong)} of {NUM_CALLS} calls match their schemas")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
