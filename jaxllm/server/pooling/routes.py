"""The pooling routes: OpenAI's embeddings, and those of vLLM, Jina and Cohere."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from starlette.routing import Route

from jaxllm.server.http.decoding import decode_request
from jaxllm.server.http.endpoint import Call, ModelEndpoint, Reply, Types
from jaxllm.server.openai.model_tasks import supported
from jaxllm.server.pooling.classification_protocol import ClassificationRequest, ClassificationResponse
from jaxllm.server.pooling.cohere_protocol import COHERE_REFUSED, CohereEmbedRequest, CohereEmbedResponse
from jaxllm.server.pooling.embedding_protocol import EmbeddingRequest, EmbeddingResponse
from jaxllm.server.pooling.pooling_protocol import POOLED_REFUSED, PoolingRequest, PoolingResponse
from jaxllm.server.pooling.scoring_protocol import (
    RERANK_REFUSED,
    SCORE_REFUSED,
    RerankRequest,
    RerankResponse,
    ScoreRequest,
    ScoreResponse,
)
from jaxllm.server.pooling.serving import PooledServing
from jaxllm.server.pooling.vectors import VectorBytes

type Handler = Callable[[PooledServing, Call], Awaitable[Reply]]

SCORE_PATHS = ("/score", "/v1/score")
RERANK_PATHS = ("/rerank", "/v1/rerank", "/v2/rerank")


def routes(pick: Callable[[Any], PooledServing]) -> list[Route]:
    """Return the routes, which any model has: a model that cannot serve a route refuses its requests. `pick` returns
    what answers for a model.
    """

    def route(path: str, handler: Handler, response: Any, request: Any) -> Route:
        return Route(path, ModelEndpoint(handler, pick, Types(response, request), runs_model=True), methods=["POST"])

    return [
        route("/v1/embeddings", answer_embedding, EmbeddingResponse, EmbeddingRequest),
        route("/v2/embed", answer_cohere_embedding, CohereEmbedResponse, CohereEmbedRequest),
        route("/pooling", answer_pooling, PoolingResponse, PoolingRequest),
        route("/classify", answer_classification, ClassificationResponse, ClassificationRequest),
        *(route(path, answer_score, ScoreResponse, ScoreRequest) for path in SCORE_PATHS),
        *(route(path, answer_rerank, RerankResponse, RerankRequest) for path in RERANK_PATHS),
    ]


async def answer_embedding(pooled: PooledServing, call: Call) -> Reply:
    """Make embeddings of inputs."""
    serving = supported(pooled.embedding or pooled.token_embedding, "Embeddings")
    request = await decode_request(call.body, EmbeddingRequest, POOLED_REFUSED)
    return _reply(await serving.answer(request, call.caller))


async def answer_cohere_embedding(pooled: PooledServing, call: Call) -> Reply:
    """Make embeddings of texts, in Cohere's form."""
    serving = supported(pooled.embedding, "Embeddings")
    request = await decode_request(call.body, CohereEmbedRequest, COHERE_REFUSED)
    return Reply.json(await serving.answer_cohere(request, call.caller))


async def answer_pooling(pooled: PooledServing, call: Call) -> Reply:
    """Run a pooling task on inputs."""
    serving = supported(pooled.pooling, "Pooling")
    request = await decode_request(call.body, PoolingRequest, POOLED_REFUSED)
    return _reply(await serving.answer(request, call.caller))


async def answer_classification(pooled: PooledServing, call: Call) -> Reply:
    """Classify inputs."""
    serving = supported(pooled.classification, "Classification")
    request = await decode_request(call.body, ClassificationRequest, POOLED_REFUSED)
    return Reply.json(await serving.answer(request, call.caller))


async def answer_score(pooled: PooledServing, call: Call) -> Reply:
    """Score pairs of texts."""
    serving = supported(pooled.scores, "Score")
    request = await decode_request(call.body, ScoreRequest, SCORE_REFUSED)
    return Reply.json(await serving.answer(request, call.caller))


async def answer_rerank(pooled: PooledServing, call: Call) -> Reply:
    """Order documents by their scores for a query."""
    serving = supported(pooled.scores, "Rerank (Score)")
    request = await decode_request(call.body, RerankRequest, RERANK_REFUSED)
    return Reply.json(await serving.answer_rerank(request, call.caller))


def _reply(answer: Any) -> Reply:
    """Return an answer of vectors, in JSON or in bytes with their description in a header."""
    if not isinstance(answer, VectorBytes):
        return Reply.json(answer)
    headers = () if answer.metadata is None else ((b"metadata", answer.metadata.encode()),)
    return Reply(answer.body, content_type=b"application/octet-stream", headers=headers)
