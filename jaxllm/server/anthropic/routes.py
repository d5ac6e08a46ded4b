"""Anthropic's routes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from starlette.routing import Route

from jaxllm.server.anthropic.protocol import (
    MESSAGES_REFUSED,
    MessagesError,
    MessagesRequest,
    MessagesResponse,
    TokenCount,
)
from jaxllm.server.anthropic.serving import AnthropicServingMessages, failed
from jaxllm.server.http.decoding import decode_request
from jaxllm.server.http.endpoint import EVENT_STREAM, Call, ModelEndpoint, Reply, Types
from jaxllm.server.http.errors import error_headers, error_response
from jaxllm.server.http.sse import EventStream


def routes(pick: Callable[[Any], AnthropicServingMessages]) -> list[Route]:
    """Return the routes: `pick` returns what answers for a model."""
    message = Types(MessagesResponse, MessagesRequest, error=MessagesError)
    count = Types(TokenCount, MessagesRequest, error=MessagesError)
    answer = ModelEndpoint(answer_message, pick, message, runs_model=True, refusal=refusal)
    counts = ModelEndpoint(count_tokens, pick, count, refusal=refusal)
    return [
        Route("/v1/messages", answer, methods=["POST"]),
        Route("/v1/messages/count_tokens", counts, methods=["POST"]),
    ]


async def answer_message(serving: AnthropicServingMessages, call: Call) -> Reply:
    """Create a message, in Anthropic's form."""
    request = await decode_request(call.body, MessagesRequest, MESSAGES_REFUSED)
    answer = await serving.answer(request, call.caller)
    return Reply(answer, content_type=EVENT_STREAM) if isinstance(answer, EventStream) else Reply.json(answer)


async def count_tokens(serving: AnthropicServingMessages, call: Call) -> Reply:
    """Count the tokens of a message's prompt."""
    request = await decode_request(call.body, MessagesRequest, MESSAGES_REFUSED)
    return Reply.json(await serving.count_tokens(request))


def refusal(error: BaseException, request_id: str) -> Reply:
    """Return the answer to a failed request in Anthropic's form."""
    response = error_response(error)
    body = failed(response, request_id)
    headers = (*error_headers(response), (b"request-id", body.request_id.encode()))
    return Reply.json(body, response.error.code)._replace(headers=headers)
