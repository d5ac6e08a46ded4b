"""Ollama's routes."""

from __future__ import annotations

from starlette.routing import Route

from jaxllm.server.http.decoding import decode_aside
from jaxllm.server.http.endpoint import Call, Endpoint, Reply
from jaxllm.server.http.errors import error_headers, error_response
from jaxllm.server.http.sse import EventStream
from jaxllm.server.ollama.protocol import (
    OLLAMA_REFUSED,
    OllamaChatRequest,
    OllamaEmbeddingRequest,
    OllamaEmbedRequest,
    OllamaError,
    OllamaGenerateRequest,
    OllamaShowRequest,
    OllamaVersion,
)

LINES = b"application/x-ndjson"
API_VERSION = "0.12.0"
"""The version of Ollama whose API these routes have: clients ask whether it is new enough."""


def routes() -> list[Route]:
    """Return the routes."""

    def endpoint(handler, **options: bool) -> Endpoint:
        return Endpoint(handler, refusal=refusal, **options)

    return [
        Route("/api/version", endpoint(show_version, takes_json=False), methods=["GET"]),
        Route("/api/tags", endpoint(list_models, takes_json=False), methods=["GET"]),
        Route("/api/ps", endpoint(list_running, takes_json=False), methods=["GET"]),
        Route("/api/show", endpoint(show_model), methods=["POST"]),
        Route("/api/chat", endpoint(answer_chat, runs_model=True), methods=["POST"]),
        Route("/api/generate", endpoint(answer_prompt, runs_model=True), methods=["POST"]),
        Route("/api/embed", endpoint(embed_texts, runs_model=True), methods=["POST"]),
        Route("/api/embeddings", endpoint(embed_prompt, runs_model=True), methods=["POST"]),
    ]


async def show_version(_call: Call) -> Reply:
    """Say which version of Ollama's API this is."""
    return Reply.json(OllamaVersion(API_VERSION))


async def list_models(call: Call) -> Reply:
    """List the model for Ollama's clients."""
    return Reply.json(call.state.ollama_serving.tags())


async def list_running(call: Call) -> Reply:
    """List the model that is loaded for Ollama's clients."""
    return Reply.json(call.state.ollama_serving.running())


async def show_model(call: Call) -> Reply:
    """Show what is known of the model to Ollama's clients."""
    request = await decode_aside(call.body, OllamaShowRequest, {})
    return Reply.json(call.state.ollama_serving.show(request.model or request.name or ""))


async def answer_chat(call: Call) -> Reply:
    """Answer a conversation in Ollama's form."""
    request = await decode_aside(call.body, OllamaChatRequest, OLLAMA_REFUSED)
    answer = await call.state.ollama_serving.chat(request, call.caller)
    return Reply(answer, content_type=LINES) if isinstance(answer, EventStream) else Reply.json(answer)


async def answer_prompt(call: Call) -> Reply:
    """Answer a prompt in Ollama's form."""
    request = await decode_aside(call.body, OllamaGenerateRequest, OLLAMA_REFUSED)
    answer = await call.state.ollama_serving.generate(request, call.caller)
    return Reply(answer, content_type=LINES) if isinstance(answer, EventStream) else Reply.json(answer)


async def embed_texts(call: Call) -> Reply:
    """Make embeddings of texts in Ollama's form."""
    request = await decode_aside(call.body, OllamaEmbedRequest, {})
    return Reply.json(await call.state.ollama_serving.embed(request, call.caller))


async def embed_prompt(call: Call) -> Reply:
    """Make the embedding of one text in Ollama's older form."""
    request = await decode_aside(call.body, OllamaEmbeddingRequest, {})
    return Reply.json(await call.state.ollama_serving.embed_prompt(request, call.caller))


def refusal(error: BaseException, _request_id: str) -> Reply:
    """Return the answer that Ollama's clients get to a request that failed."""
    response = error_response(error)
    reply = Reply.json(OllamaError(response.error.message), response.error.code)
    return reply._replace(headers=tuple(error_headers(response)))
