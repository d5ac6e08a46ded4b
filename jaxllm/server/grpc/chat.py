"""Convert gRPC messages to chat requests, and HTTP's answers and events to messages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec

from jaxllm.exceptions import VLLMValidationError
from jaxllm.params.checks import shown
from jaxllm.server.grpc.fields import read_fields
from jaxllm.server.grpc.inference_pb2 import (
    ChatChoice,
    ChatLogprobs,
    ChatMessage,
    ChatRequest,
    ChatResponse,
    ChatTokenLogprob,
    FunctionCall,
    ToolCall,
    Usage,
)
from jaxllm.server.http.sse import DONE
from jaxllm.server.openai.chat_protocol import ChatCompletionRequest, ChatCompletionResponse
from jaxllm.server.openai.sampling_fields import StreamOptions

_DATA = b"data: "


def chat_request(data: bytes, *, stream: bool) -> ChatCompletionRequest:
    """Return the unchecked request in a `ChatRequest`. Raises VLLMValidationError for a malformed message, or one
    without messages.
    """
    fields = read_fields(data, ChatRequest)
    if "messages" not in fields:
        raise VLLMValidationError("messages must have at least one message.", parameter="messages")
    choice = fields.get("tool_choice")
    if not isinstance(choice, str | dict | None):
        message = f"tool_choice must be a text or an object, got {shown(choice)}."
        raise VLLMValidationError(message, parameter="tool_choice", value=choice)
    options = StreamOptions(include_usage=True) if stream else None
    return ChatCompletionRequest(stream=stream, stream_options=options, **fields)


def whole_answer(answer: ChatCompletionResponse) -> ChatResponse:
    """Return the message of a whole answer."""
    return _response(msgspec.to_builtins(answer))


def pieces_of(frames: bytes) -> Iterator[ChatResponse]:
    """Yield the messages of HTTP's events; comments and the mark of the end make none."""
    for frame in frames.split(b"\n\n"):
        if frame.startswith(_DATA) and frame + b"\n\n" != DONE:
            yield _response(msgspec.json.decode(frame[len(_DATA) :]))


def _response(answer: Mapping[str, Any]) -> ChatResponse:
    usage = answer.get("usage")
    return ChatResponse(
        id=answer["id"],
        model=answer["model"],
        created=answer["created"],
        choices=map(_choice, answer["choices"]),
        usage=None if usage is None else _usage(usage),
        prompt_token_ids=answer.get("prompt_token_ids"),
    )


def _choice(choice: Mapping[str, Any]) -> ChatChoice:
    logprobs = choice["logprobs"]
    made = ChatChoice(
        index=choice["index"],
        message=_message(choice["message"]) if "message" in choice else None,
        delta=_message(choice["delta"]) if "delta" in choice else None,
        logprobs=None if logprobs is None else ChatLogprobs(content=_tokens(logprobs["content"])),
        finish_reason=choice["finish_reason"],
        token_ids=choice.get("token_ids"),
    )
    reason = choice.get("stop_reason")
    if isinstance(reason, int):
        made.stop_token_id = reason
    elif reason is not None and made.finish_reason in ("stop", "tool_calls"):
        made.stop_string = reason
    return made


def _message(message: Mapping[str, Any]) -> ChatMessage:
    return ChatMessage(
        role=message.get("role"),
        content=message.get("content"),
        reasoning=message.get("reasoning"),
        tool_calls=map(_call, message.get("tool_calls", ())),
    )


def _call(call: Mapping[str, Any]) -> ToolCall:
    function = FunctionCall(**call["function"])
    return ToolCall(index=call.get("index"), id=call.get("id"), type=call.get("type"), function=function)


def _tokens(tokens: Iterable[Mapping[str, Any]]) -> Iterator[ChatTokenLogprob]:
    for token in tokens:
        encoded = token["bytes"]
        yield ChatTokenLogprob(
            token=token["token"],
            logprob=token["logprob"],
            bytes=None if encoded is None else bytes(encoded),
            top_logprobs=_tokens(token.get("top_logprobs", ())),
        )


def _usage(usage: Mapping[str, Any]) -> Usage:
    prompt, answer = usage.get("prompt_tokens_details") or {}, usage.get("completion_tokens_details") or {}
    return Usage(
        prompt_tokens=usage["prompt_tokens"],
        completion_tokens=usage["completion_tokens"],
        total_tokens=usage["total_tokens"],
        cached_tokens=prompt.get("cached_tokens"),
        reasoning_tokens=answer.get("reasoning_tokens"),
    )
