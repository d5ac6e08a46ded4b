"""Anthropic's routes."""

from __future__ import annotations

from starlette.routing import Route

from jaxllm.server.anthropic.protocol import MESSAGES_REFUSED, MessagesRequest
from jaxllm.server.anthropic.serving import failed
from jaxllm.server.http.decoding import decode_aside
from jaxllm.server.http.endpoint import EVENT_STREAM, Call, Endpoint, Reply
from jaxllm.server.http.errors import error_headers, error_response
from jaxllm.server.http.sse import EventStream


def routes() -> list[Route]:
    """Return the routes."""
    return [
        Route("/v1/messages", Endpoint(answer_message, runs_model=True, refusal=refusal), methods=["POST"]),
        Route("/v1/messages/count_tokens", Endpoint(count_tokens, refusal=refusal), methods=["POST"]),
    ]


async def answer_message(call: Call) -> Reply:
    """Answer a message in Anthropic's form."""
    request = await decode_aside(call.body, MessagesRequest, MESSAGES_REFUSED)
    answer = await call.state.anthropic_serving_messages.answer(request, call.caller)
    return Reply(answer, content_type=EVENT_STREAM) if isinstance(answer, EventStream) else Reply.json(answer)


async def count_tokens(call: Call) -> Reply:
    """Count the tokens of a message's prompt."""
    request = await decode_aside(call.body, MessagesRequest, MESSAGES_REFUSED)
    return Reply.json(await call.state.anthropic_serving_messages.count_tokens(request))


def refusal(error: BaseException, request_id: str) -> Reply:
    """Return the answer that Anthropic's clients get to a request that failed."""
    response = error_response(error)
    body = failed(response, request_id)
    headers = (*error_headers(response), (b"request-id", body.request_id.encode()))
    return Reply.json(body, response.error.code)._replace(headers=headers)
