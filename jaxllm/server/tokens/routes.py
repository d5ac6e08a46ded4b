"""vLLM's routes of token ids: generation, and scores of items by the probability of a token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from starlette.routing import Route

from jaxllm.server.http.decoding import decode_request
from jaxllm.server.http.endpoint import EVENT_STREAM, Call, ModelEndpoint, Reply, Types
from jaxllm.server.http.load_report import load_headers
from jaxllm.server.http.sse import EventStream
from jaxllm.server.tokens.protocol import TOKENS_REFUSED, GenerateRequest, GenerateResponse, GenerateStreamResponse
from jaxllm.server.tokens.scoring import (
    GenerativeScoringRequest,
    GenerativeScoringResponse,
    ServingGenerativeScoring,
)
from jaxllm.server.tokens.serving import ServingTokens


def routes(tokens: Callable[[Any], ServingTokens], scoring: Callable[[Any], ServingGenerativeScoring]) -> list[Route]:
    """Return the routes: the arguments return what answers for a model."""
    generation = Types(GenerateResponse, GenerateRequest, GenerateStreamResponse)
    scores = Types(GenerativeScoringResponse, GenerativeScoringRequest)
    endpoints: dict[str, ModelEndpoint[Any]] = {
        "/inference/v1/generate": ModelEndpoint(generate, tokens, generation, runs_model=True),
        "/generative_scoring": ModelEndpoint(score_items, scoring, scores, runs_model=True),
    }
    return [Route(path, endpoint, methods=["POST"]) for path, endpoint in endpoints.items()]


async def generate(serving: ServingTokens, call: Call) -> Reply:
    """Generate token ids from token ids."""
    request = await decode_request(call.body, GenerateRequest, TOKENS_REFUSED)
    answer = await serving.answer(request, call.caller)
    if isinstance(answer, EventStream):
        return Reply(answer, content_type=EVENT_STREAM)
    return Reply.json(answer)._replace(headers=load_headers(call.engine_client, call.headers))


async def score_items(serving: ServingGenerativeScoring, call: Call) -> Reply:
    """Score items by the probability of a token after each of them."""
    request = await decode_request(call.body, GenerativeScoringRequest, {})
    return Reply.json(await serving.answer(request, call.caller))
