"""Cohere's routes of chat, under Cohere's path and vLLM's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from starlette.routing import Route

from jaxllm.server.cohere.protocol import (
    COHERE_CHAT_REFUSED,
    CohereChatEvent,
    CohereChatRequest,
    CohereChatResponse,
    CohereError,
)
from jaxllm.server.cohere.serving import CohereServingChat
from jaxllm.server.http.decoding import decode_request
from jaxllm.server.http.endpoint import EVENT_STREAM, Call, ModelEndpoint, Reply, Types
from jaxllm.server.http.errors import error_headers, error_response
from jaxllm.server.http.sse import EventStream

CHAT_PATHS = ("/v2/chat", "/cohere/v2/chat")


def routes(pick: Callable[[Any], CohereServingChat]) -> list[Route]:
    """Return the routes: `pick` returns what answers for a model."""
    types = Types(CohereChatResponse, CohereChatRequest, CohereChatEvent, CohereError)
    answer = ModelEndpoint(answer_cohere_chat, pick, types, runs_model=True, refusal=refusal)
    return [Route(path, answer, methods=["POST"]) for path in CHAT_PATHS]


async def answer_cohere_chat(serving: CohereServingChat, call: Call) -> Reply:
    """Answer a conversation, in Cohere's form."""
    request = await decode_request(call.body, CohereChatRequest, COHERE_CHAT_REFUSED)
    answer = await serving.answer(request, call.caller)
    return Reply(answer, content_type=EVENT_STREAM) if isinstance(answer, EventStream) else Reply.json(answer)


def refusal(error: BaseException, request_id: str) -> Reply:
    """Return the answer to a failed request in Cohere's form."""
    response = error_response(error)
    reply = Reply.json(CohereError(response.error.message, request_id), response.error.code)
    return reply._replace(headers=tuple(error_headers(response)))
