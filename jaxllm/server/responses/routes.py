"""OpenAI's routes for Responses."""

from __future__ import annotations

from urllib.parse import parse_qs

from starlette.routing import Route

from jaxllm.exceptions import VLLMValidationError
from jaxllm.server.http.decoding import decode_aside
from jaxllm.server.http.endpoint import EVENT_STREAM, Call, Endpoint, Reply
from jaxllm.server.http.sse import EventStream
from jaxllm.server.responses.request import RESPONSES_REFUSED, ResponsesRequest

CREATE, ONE, CANCEL = "/v1/responses", "/v1/responses/{response_id}", "/v1/responses/{response_id}/cancel"


def routes() -> list[Route]:
    """Return the routes."""
    return [
        Route(CREATE, Endpoint(answer_response, runs_model=True), methods=["POST"]),
        Route(ONE, Endpoint(show_response, takes_json=False), methods=["GET"]),
        Route(ONE, Endpoint(delete_response, takes_json=False), methods=["DELETE"]),
        Route(CANCEL, Endpoint(cancel_response, takes_json=False), methods=["POST"]),
    ]


async def answer_response(call: Call) -> Reply:
    """Answer with a response."""
    request = await decode_aside(call.body, ResponsesRequest, RESPONSES_REFUSED)
    answer = await call.state.openai_serving_responses.answer(request, call.caller)
    return Reply(answer, content_type=EVENT_STREAM) if isinstance(answer, EventStream) else Reply.json(answer)


async def show_response(call: Call) -> Reply:
    """Show a response that is kept, or being made in the background."""
    if parse_qs(call.query).get(b"stream", [b"false"])[-1].lower() not in (b"false", b"0"):
        message = "stream: a response is not streamed once its request has ended: ask for it as a whole."
        raise VLLMValidationError(message, parameter="stream")
    return Reply(call.state.openai_serving_responses.retrieve(call.path["response_id"]))


async def cancel_response(call: Call) -> Reply:
    """End a response that is being made in the background."""
    return Reply(await call.state.openai_serving_responses.cancel(call.path["response_id"]))


async def delete_response(call: Call) -> Reply:
    """Forget a response."""
    return Reply.json(await call.state.openai_serving_responses.delete(call.path["response_id"]))
