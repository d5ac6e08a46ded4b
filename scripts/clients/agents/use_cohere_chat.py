"""Run Cohere's package against a server: chats, streams, tools, JSON and errors."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import cohere
from weather import ANSWER, QUESTION, RESULT, SCHEMA, asked, check_called, get_weather

FUNCTION = {"name": "get_weather", "description": "Say how the weather is in a city.", "parameters": SCHEMA}
TOOLS: list[Any] = [{"type": "function", "function": FUNCTION}]
REQUEST: dict[str, Any] = {"model": "model", "max_tokens": 200, "tools": TOOLS}
HELLO: list[Any] = [{"role": "user", "content": "x"}]


def ask_streamed(client: cohere.ClientV2, messages: list[Any], **fields: Any) -> tuple[dict[str, Any], Any]:
    """Return a streamed message, put together, and its last event."""
    texts: list[str] = []
    calls: list[Any] = []
    end: Any = None
    for event in client.chat_stream(messages=messages, **REQUEST, **fields):
        match event.type:
            case "content-delta":
                texts.append(event.delta.message.content.text or "")
            case "tool-call-start":
                calls.append(event.delta.message.tool_calls.model_dump(exclude_none=True))
            case "tool-call-delta":
                calls[event.index]["function"]["arguments"] += event.delta.message.tool_calls.function.arguments
            case "message-end":
                end = event.delta
    return {"role": "assistant", "content": "".join(texts) or None, "tool_calls": calls or None}, end


def ask_whole(client: cohere.ClientV2, messages: list[Any], **fields: Any) -> tuple[dict[str, Any], Any]:
    """Return a message, and the answer that it came in."""
    answer = client.chat(messages=messages, **REQUEST, **fields)
    text = "".join(block.text for block in answer.message.content or [] if block.type == "text")
    calls = [call.model_dump(exclude_none=True) for call in answer.message.tool_calls or []]
    return {"role": "assistant", "content": text or None, "tool_calls": calls or None}, answer


def check_loop(client: cohere.ClientV2, mode: str, *, streamed: bool) -> None:
    """Let the model call the tool and answer with its result."""
    ask = ask_streamed if streamed else ask_whole
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    message, end = ask(client, messages, tool_choice="REQUIRED", strict_tools=True)
    assert end.finish_reason == "TOOL_CALL", end
    assert end.usage.tokens.output_tokens > 0
    [call] = message["tool_calls"][:1]
    assert call["function"]["name"] == "get_weather"
    result = get_weather(**json.loads(call["function"]["arguments"]))
    check_called(mode)
    assert result == RESULT
    document = {"type": "document", "document": {"data": {"text": result}}}
    messages += [message, {"role": "tool", "tool_call_id": call["id"], "content": [document]}]
    final, end = ask(client, messages)
    assert end.finish_reason in ("COMPLETE", "MAX_TOKENS", "TOOL_CALL"), end
    if mode == "replayed":
        assert final["content"] == ANSWER, final


def check_options(client: cohere.ClientV2, mode: str) -> None:
    """Check the answer's form, its log-probabilities and the order of a stream's events."""
    answer = client.chat(model="model", messages=HELLO, max_tokens=5, logprobs=mode != "replayed", p=0.9, k=20, seed=7)
    assert answer.usage.tokens.output_tokens == answer.usage.billed_units.output_tokens <= 5
    assert mode == "replayed" or len(answer.logprobs) == answer.usage.tokens.output_tokens
    kinds = [event.type for event in client.chat_stream(model="model", messages=HELLO, max_tokens=5)]
    assert kinds[:2] == ["message-start", "content-start"], kinds
    assert kinds[-2:] == ["content-end", "message-end"], kinds
    if mode != "replayed":
        schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
        form: Any = {"type": "json_object", "json_schema": schema}
        held = client.chat(model="model", messages=HELLO, max_tokens=50, response_format=form)
        assert json.loads(held.message.content[0].text)["ok"] in (True, False)


def check_errors(client: cohere.ClientV2) -> None:
    """Check that refusals raise the package's errors."""
    refusals: list[tuple[dict[str, Any], Any]] = [
        ({"model": "other"}, cohere.NotFoundError),
        ({"stop_sequences": [""]}, cohere.BadRequestError),
        ({"citation_options": {"mode": "FAST"}}, cohere.BadRequestError),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, cohere.BadRequestError),
    ]
    for fields, kind in refusals:
        arguments: dict[str, Any] = {"model": "model", "max_tokens": 5, "messages": HELLO}
        try:
            client.chat(**(arguments | fields))
        except kind as error:
            form = set(error.body)
        else:
            form = {"taken"}
        assert form == {"message", "id"}, (fields, form)


async def chat_at_once(url: str, key: str) -> None:
    """Send several requests at once, by the asynchronous client and vLLM's path."""
    client = cohere.AsyncClientV2(api_key=key, base_url=f"{url}/cohere")
    answers = await asyncio.gather(*(client.chat(model="model", messages=HELLO, max_tokens=5) for _ in range(4)))
    assert all(answer.message.role == "assistant" for answer in answers)


def main() -> None:
    url, key, mode = sys.argv[1:]
    client = cohere.ClientV2(api_key=key, base_url=url, timeout=300)
    for streamed in (False, True):
        check_loop(client, mode, streamed=streamed)
    check_options(client, mode)
    check_errors(client)
    asyncio.run(chat_at_once(url, key))
    assert not asked


if __name__ == "__main__":
    main()
