"""The routes of models that pool: OpenAI's embeddings, and vLLM's, Jina's and Cohere's beside them."""

from __future__ import annotations

from typing import Any

from starlette.routing import Route

from jaxllm.server.http.decoding import decode_aside
from jaxllm.server.http.endpoint import Call, Endpoint, Reply
from jaxllm.server.openai.model_tasks import supported
from jaxllm.server.pooling.classification_protocol import ClassificationRequest
from jaxllm.server.pooling.cohere_protocol import COHERE_REFUSED, CohereEmbedRequest
from jaxllm.server.pooling.embedding_protocol import EmbeddingRequest
from jaxllm.server.pooling.pooling_protocol import POOLED_REFUSED, PoolingRequest
from jaxllm.server.pooling.scoring_protocol import RERANK_REFUSED, RerankRequest, ScoreRequest
from jaxllm.server.pooling.vectors import VectorBytes

SCORE_PATHS = ("/score", "/v1/score")
RERANK_PATHS = ("/rerank", "/v1/rerank", "/v2/rerank")


def routes() -> list[Route]:
    """Return the routes, which any model has: one that cannot serve a route says so there."""
    return [
        Route("/v1/embeddings", Endpoint(answer_embedding, runs_model=True), methods=["POST"]),
        Route("/v2/embed", Endpoint(answer_cohere_embedding, runs_model=True), methods=["POST"]),
        Route("/pooling", Endpoint(answer_pooling, runs_model=True), methods=["POST"]),
        Route("/classify", Endpoint(answer_classification, runs_model=True), methods=["POST"]),
        *(Route(path, Endpoint(answer_score, runs_model=True), methods=["POST"]) for path in SCORE_PATHS),
        *(Route(path, Endpoint(answer_rerank, runs_model=True), methods=["POST"]) for path in RERANK_PATHS),
    ]


async def answer_embedding(call: Call) -> Reply:
    """Make embeddings of inputs."""
    pooled = call.state.pooled_serving
    serving = supported(pooled.embedding or pooled.token_embedding, "Embeddings")
    request = await decode_aside(call.body, EmbeddingRequest, POOLED_REFUSED)
    return _reply(await serving.answer(request, call.caller))


async def answer_cohere_embedding(call: Call) -> Reply:
    """Make embeddings of texts, in Cohere's form."""
    serving = supported(call.state.pooled_serving.embedding, "Embeddings")
    request = await decode_aside(call.body, CohereEmbedRequest, COHERE_REFUSED)
    return Reply.json(await serving.answer_cohere(request, call.caller))


async def answer_pooling(call: Call) -> Reply:
    """Do one of the model's tasks with inputs."""
    serving = supported(call.state.pooled_serving.pooling, "Pooling")
    request = await decode_aside(call.body, PoolingRequest, POOLED_REFUSED)
    return _reply(await serving.answer(request, call.caller))


async def answer_classification(call: Call) -> Reply:
    """Say which class each input has."""
    serving = supported(call.state.pooled_serving.classification, "Classification")
    request = await decode_aside(call.body, ClassificationRequest, POOLED_REFUSED)
    return Reply.json(await serving.answer(request, call.caller))


async def answer_score(call: Call) -> Reply:
    """Score pairs of texts."""
    serving = supported(call.state.pooled_serving.scores, "Score")
    request = await decode_aside(call.body, ScoreRequest, POOLED_REFUSED)
    return Reply.json(await serving.answer(request, call.caller))


async def answer_rerank(call: Call) -> Reply:
    """Order documents by their scores for a query."""
    serving = supported(call.state.pooled_serving.scores, "Rerank (Score)")
    request = await decode_aside(call.body, RerankRequest, RERANK_REFUSED)
    return Reply.json(await serving.answer_rerank(request, call.caller))


def _reply(answer: Any) -> Reply:
    """Return an answer of vectors, in JSON or in bytes with their description in a header."""
    if not isinstance(answer, VectorBytes):
        return Reply.json(answer)
    headers = () if answer.metadata is None else ((b"metadata", answer.metadata.encode()),)
    return Reply(answer.body, content_type=b"application/octet-stream", headers=headers)
