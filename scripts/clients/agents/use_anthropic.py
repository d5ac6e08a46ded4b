"""Run the anthropic package against a server: messages, streams, tools and the count of tokens."""

from __future__ import annotations

import base64
import sys
from pathlib import Path
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


def check_picture(client: anthropic.Anthropic, file: str) -> None:
    """Show a picture to a model that sees, in a message and in a tool's result."""
    data = base64.b64encode(Path(file).read_bytes()).decode()
    picture = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}
    text = {"type": "text", "text": "What is this?"}
    call = {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {"city": "Bern"}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1"}
    conversations: list[list[Any]] = [[{"role": "user", "content": content}] for content in ([picture, text], [text])]
    conversations += [
        [{"role": "assistant", "content": [call]}, {"role": "user", "content": [{**result, "content": content}]}]
        for content in ([picture, text], [text])
    ]
    counts = []
    for messages in conversations:
        answer = client.messages.create(model="tiny", max_tokens=8, messages=messages)
        assert answer.usage.output_tokens > 0
        counts.append(client.messages.count_tokens(model="tiny", messages=messages).input_tokens)
        cached = (answer.usage.cache_read_input_tokens or 0) + (answer.usage.cache_creation_input_tokens or 0)
        assert answer.usage.input_tokens + cached == counts[-1]
    assert counts[0] - counts[1] > 1, "a picture takes several tokens"
    assert counts[2] - counts[3] > 1


def main() -> None:
    url, key, mode, *files = sys.argv[1:]
    client = anthropic.Anthropic(base_url=url, api_key=key, max_retries=0, timeout=300)
    if mode == "pictures":
        check_picture(client, *files)
        return
    for streamed in (False, True):
        check_loop(client, mode, streamed=streamed)
    check_errors(client)
    assert not asked


if __name__ == "__main__":
    main()
