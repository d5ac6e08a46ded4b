"""Run the anthropic package against a server: messages, streams, tools and the count of tokens."""

from __future__ import annotations

import sys
from typing import Any

import anthropic
from weather import ANSWER, QUESTION, RESULT, SCHEMA, asked, check_called, get_weather

TOOL: dict[str, Any] = {
    "name": "get_weather",
    "description": "Say how the weather is in a city.",
    "input_schema": SCHEMA,
}


def check_loop(client: anthropic.Anthropic, mode: str, *, streamed: bool) -> None:
    """Let the model call the tool and answer with its result."""
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    request: dict[str, Any] = {"model": "model", "max_tokens": 200, "tools": [TOOL]}
    choice = {"tool_choice": {"type": "any", "disable_parallel_tool_use": True}}
    if streamed:
        with client.messages.stream(messages=messages, **request, **choice) as stream:
            for _ in stream.text_stream:
                pass
            message = stream.get_final_message()
    else:
        message = client.messages.create(messages=messages, **request, **choice)
    assert message.stop_reason == "tool_use", message
    [call] = [block for block in message.content if block.type == "tool_use"]
    assert call.name == "get_weather"
    result = get_weather(**call.input)
    check_called(mode)
    assert result == RESULT
    messages += [
        {"role": "assistant", "content": message.content},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": result}]},
    ]
    final = client.messages.create(messages=messages, **request)
    assert final.stop_reason in ("end_turn", "max_tokens", "tool_use"), final
    if mode == "replayed":
        assert [block.text for block in final.content] == [ANSWER], final
    counted = client.messages.count_tokens(model="model", messages=messages, tools=[TOOL])
    assert counted.input_tokens == final.usage.input_tokens + final.usage.cache_read_input_tokens


def check_errors(client: anthropic.Anthropic) -> None:
    """Check that refusals raise the package's own errors."""
    for fields, kind in (
        ({"model": "other"}, anthropic.NotFoundError),
        ({"stop_sequences": [""]}, anthropic.BadRequestError),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, anthropic.BadRequestError),
    ):
        arguments: dict[str, Any] = {"model": "model", "max_tokens": 5, "messages": [{"role": "user", "content": "x"}]}
        try:
            client.messages.create(**(arguments | fields))
        except kind as error:
            form = error.body["type"]
        else:
            form = "taken"
        assert form == "error", (fields, form)


def main() -> None:
    url, key, mode = sys.argv[1:]
    client = anthropic.Anthropic(base_url=url, api_key=key, max_retries=0, timeout=300)
    for streamed in (False, True):
        check_loop(client, mode, streamed=streamed)
    check_errors(client)
    assert not asked


if __name__ == "__main__":
    main()
