"""vLLM's routes of token ids: generation, and scores of items by the probability of a token."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from starlette.routing import Route

from jaxllm.server.http.decoding import decode_request
from jaxllm.server.http.endpoint import EVENT_STREAM, Call, Endpoint, Reply, Types
from jaxllm.server.http.load_report import load_headers
from jaxllm.server.http.sse import EventStream
from jaxllm.server.http.state import ServerLoad
from jaxllm.server.openai.serving_chat import OpenAIServingChat
from jaxllm.server.tokens.protocol import TOKENS_REFUSED, GenerateRequest, GenerateResponse, GenerateStreamResponse
from jaxllm.server.tokens.scoring import (
    GenerativeScoringRequest,
    GenerativeScoringResponse,
    ServingGenerativeScoring,
)
from jaxllm.server.tokens.serving import ServingTokens


class Serving(NamedTuple):
    """The objects that answer the routes."""

    tokens: ServingTokens
    scoring: ServingGenerativeScoring


def make_serving(chat: OpenAIServingChat, _load: ServerLoad) -> Serving:
    """Return the objects that answer the routes."""
    return Serving(ServingTokens(chat), ServingGenerativeScoring(chat))


def routes(serving: Callable[[], Serving]) -> list[Route]:
    """Return the routes."""
    generation = Types(GenerateResponse, GenerateRequest, GenerateStreamResponse)
    scoring = Types(GenerativeScoringResponse, GenerativeScoringRequest)
    endpoints = {
        "/inference/v1/generate": Endpoint(generate, serving, generation, runs_model=True),
        "/generative_scoring": Endpoint(score_items, serving, scoring, runs_model=True),
    }
    return [Route(path, endpoint, methods=["POST"]) for path, endpoint in endpoints.items()]


async def generate(serving: Serving, call: Call) -> Reply:
    """Generate token ids from token ids."""
    request = await decode_request(call.body, GenerateRequest, TOKENS_REFUSED)
    answer = await serving.tokens.answer(request, call.caller)
    if isinstance(answer, EventStream):
        return Reply(answer, content_type=EVENT_STREAM)
    return Reply.json(answer)._replace(headers=load_headers(call.engine_client, call.headers))


async def score_items(serving: Serving, call: Call) -> Reply:
    """Score items by the probability of a token after each of them."""
    request = await decode_request(call.body, GenerativeScoringRequest, {})
    return Reply.json(await serving.scoring.answer(request, call.caller))
