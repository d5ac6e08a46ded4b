"""OpenAI's routes for Responses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import parse_qs

from starlette.routing import Route

from jaxllm.exceptions import VLLMValidationError
from jaxllm.params.checks import check_choice, shown
from jaxllm.server.http.decoding import decode_request
from jaxllm.server.http.endpoint import EVENT_STREAM, Call, Endpoint, ModelEndpoint, Reply, Types
from jaxllm.server.http.sse import EventStream
from jaxllm.server.responses.items import DEFAULT_LISTED, MAX_LISTED, ItemList, Page
from jaxllm.server.responses.kept import KeptResponses
from jaxllm.server.responses.objects import DeletedResponse, Response
from jaxllm.server.responses.request import RESPONSES_REFUSED, ResponsesRequest
from jaxllm.server.responses.serving import OpenAIServingResponses
from jaxllm.server.responses.stream import ResponseEvent

CREATE, ONE = "/v1/responses", "/v1/responses/{response_id}"
CANCEL, INPUT = f"{ONE}/cancel", f"{ONE}/input_items"
_MAX_DIGITS = 18


def routes(pick: Callable[[Any], OpenAIServingResponses], kept: KeptResponses) -> list[Route]:
    """Return the routes: `pick` returns what answers for a model, and `kept` are the responses of all models."""
    create, whole, deleted = Types(Response, ResponsesRequest, ResponseEvent), Types(Response), Types(DeletedResponse)
    streamed, items = Types(Response, event=ResponseEvent), Types(ItemList)
    return [
        Route(CREATE, ModelEndpoint(answer_response, pick, create, runs_model=True), methods=["POST"]),
        Route(ONE, Endpoint(show_response, lambda: kept, streamed, takes_json=False), methods=["GET"]),
        Route(ONE, Endpoint(delete_response, lambda: kept, deleted, takes_json=False), methods=["DELETE"]),
        Route(INPUT, Endpoint(list_input, lambda: kept, items, takes_json=False), methods=["GET"]),
        Route(CANCEL, Endpoint(cancel_response, lambda: kept, whole, takes_json=False), methods=["POST"]),
    ]


async def answer_response(serving: OpenAIServingResponses, call: Call) -> Reply:
    """Create a response."""
    request = await decode_request(call.body, ResponsesRequest, RESPONSES_REFUSED)
    answer = await serving.answer(request, call.caller)
    return Reply(answer, content_type=EVENT_STREAM) if isinstance(answer, EventStream) else Reply.json(answer)


async def show_response(kept: KeptResponses, call: Call) -> Reply:
    """Retrieve a stored response, or one that is running in the background; or stream its events."""
    query = parse_qs(call.query.decode("latin-1"), keep_blank_values=True)
    streams, after = _flag(query, "stream"), _number(query, "starting_after", 0)
    if not streams and after is not None:
        raise VLLMValidationError("starting_after is for stream=true: leave it out.", parameter="starting_after")
    response_id = call.path["response_id"]
    if not streams:
        return Reply(kept.retrieve(response_id))
    return Reply(kept.follow(response_id, 0 if after is None else after + 1), content_type=EVENT_STREAM)


async def list_input(kept: KeptResponses, call: Call) -> Reply:
    """List the input items of a response."""
    query = parse_qs(call.query.decode("latin-1"), keep_blank_values=True)
    limit, order = _number(query, "limit", 1, MAX_LISTED), _text(query, "order") or "desc"
    check_choice("order", order, ("asc", "desc"))
    page = Page(_text(query, "after"), DEFAULT_LISTED if limit is None else limit, order)  # type: ignore[arg-type]
    return Reply.json(await kept.input_items(call.path["response_id"], page))


async def cancel_response(kept: KeptResponses, call: Call) -> Reply:
    """Cancel a response that is running in the background."""
    return Reply(await kept.cancel(call.path["response_id"]))


async def delete_response(kept: KeptResponses, call: Call) -> Reply:
    """Delete a response."""
    return Reply.json(await kept.delete(call.path["response_id"]))


def _text(query: Mapping[str, list[str]], name: str) -> str | None:
    """Return a parameter of the query; the last one counts."""
    return query[name][-1] if name in query else None


def _flag(query: Mapping[str, list[str]], name: str) -> bool:
    value = (_text(query, name) or "false").lower()
    check_choice(name, value, ("true", "false", "1", "0"))
    return value in ("true", "1")


def _number(query: Mapping[str, list[str]], name: str, least: int, most: int = 10**_MAX_DIGITS) -> int | None:
    value = _text(query, name)
    if value is None:
        return None
    is_number = value.isascii() and value.isdigit() and len(value) <= _MAX_DIGITS
    if not is_number or not least <= int(value) <= most:
        bounds = f"from {least} to {most}"
        raise VLLMValidationError(f"{name} must be an integer {bounds}, got {shown(value)}.", parameter=name)
    return int(value)
