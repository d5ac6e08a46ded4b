"""OpenAI's routes for Responses."""

from __future__ import annotations

from collections.abc import Callable
from urllib.parse import parse_qs

from starlette.routing import Route

from jaxllm.exceptions import VLLMValidationError
from jaxllm.server.http.decoding import decode_request
from jaxllm.server.http.endpoint import EVENT_STREAM, Call, Endpoint, Reply, Types
from jaxllm.server.http.sse import EventStream
from jaxllm.server.http.state import ServerLoad
from jaxllm.server.openai.serving_chat import OpenAIServingChat
from jaxllm.server.responses.objects import DeletedResponse, Response
from jaxllm.server.responses.request import RESPONSES_REFUSED, ResponsesRequest
from jaxllm.server.responses.serving import OpenAIServingResponses
from jaxllm.server.responses.stream import ResponseEvent

CREATE, ONE, CANCEL = "/v1/responses", "/v1/responses/{response_id}", "/v1/responses/{response_id}/cancel"


def make_serving(chat: OpenAIServingChat, load: ServerLoad) -> OpenAIServingResponses:
    """Return the object that answers the routes, by way of `chat`."""
    return OpenAIServingResponses(chat, load.counted)


def routes(serving: Callable[[], OpenAIServingResponses]) -> list[Route]:
    """Return the routes."""
    create, whole, deleted = Types(Response, ResponsesRequest, ResponseEvent), Types(Response), Types(DeletedResponse)
    return [
        Route(CREATE, Endpoint(answer_response, serving, create, runs_model=True), methods=["POST"]),
        Route(ONE, Endpoint(show_response, serving, whole, takes_json=False), methods=["GET"]),
        Route(ONE, Endpoint(delete_response, serving, deleted, takes_json=False), methods=["DELETE"]),
        Route(CANCEL, Endpoint(cancel_response, serving, whole, takes_json=False), methods=["POST"]),
    ]


async def answer_response(serving: OpenAIServingResponses, call: Call) -> Reply:
    """Create a response."""
    request = await decode_request(call.body, ResponsesRequest, RESPONSES_REFUSED)
    answer = await serving.answer(request, call.caller)
    return Reply(answer, content_type=EVENT_STREAM) if isinstance(answer, EventStream) else Reply.json(answer)


async def show_response(serving: OpenAIServingResponses, call: Call) -> Reply:
    """Retrieve a stored response, or one that is running in the background."""
    if parse_qs(call.query).get(b"stream", [b"false"])[-1].lower() not in (b"false", b"0"):
        message = "stream: a response is not streamed once its request has ended: ask for it as a whole."
        raise VLLMValidationError(message, parameter="stream")
    return Reply(serving.retrieve(call.path["response_id"]))


async def cancel_response(serving: OpenAIServingResponses, call: Call) -> Reply:
    """Cancel a response that is running in the background."""
    return Reply(await serving.cancel(call.path["response_id"]))


async def delete_response(serving: OpenAIServingResponses, call: Call) -> Reply:
    """Delete a response."""
    return Reply.json(await serving.delete(call.path["response_id"]))
