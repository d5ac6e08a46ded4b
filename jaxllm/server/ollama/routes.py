"""Ollama's routes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from starlette.routing import Route

from jaxllm.server.http.decoding import decode_request
from jaxllm.server.http.endpoint import Call, Endpoint, Reply, Types
from jaxllm.server.http.errors import error_headers, error_response
from jaxllm.server.http.sse import EventStream
from jaxllm.server.http.state import ServerLoad
from jaxllm.server.ollama.protocol import (
    OLLAMA_REFUSED,
    OllamaAnswer,
    OllamaChatRequest,
    OllamaEmbedAnswer,
    OllamaEmbedding,
    OllamaEmbeddingRequest,
    OllamaEmbedRequest,
    OllamaError,
    OllamaGenerateRequest,
    OllamaModels,
    OllamaPullRequest,
    OllamaPullStatus,
    OllamaShow,
    OllamaShowRequest,
    OllamaVersion,
)
from jaxllm.server.ollama.pulls import check_enabled
from jaxllm.server.ollama.serving import OllamaServing
from jaxllm.server.openai.serving_chat import OpenAIServingChat
from jaxllm.server.pooling.serving import PooledServing

LINES = b"application/x-ndjson"
API_VERSION = "0.12.0"
"""The version of Ollama that these routes implement. Clients check that it is new enough."""


def make_serving(chat: OpenAIServingChat, _load: ServerLoad) -> OllamaServing:
    """Return the object that answers the routes, by way of `chat`."""
    return OllamaServing(chat, PooledServing.of(chat, chat.args).embedding)


def routes(serving: Callable[[], OllamaServing]) -> list[Route]:
    """Return the routes."""

    def endpoint(handler: Any, response: Any, request: Any = None, event: Any = None, **options: Any) -> Endpoint[Any]:
        types = Types(response, request, event, OllamaError, LINES.decode())
        return Endpoint(handler, serving, types, refusal=refusal, **options)

    chat = endpoint(answer_chat, OllamaAnswer, OllamaChatRequest, OllamaAnswer, runs_model=True)
    generate = endpoint(answer_prompt, OllamaAnswer, OllamaGenerateRequest, OllamaAnswer, runs_model=True)
    embed = endpoint(embed_texts, OllamaEmbedAnswer, OllamaEmbedRequest, runs_model=True)
    pull = endpoint(pull_model, OllamaPullStatus, OllamaPullRequest, OllamaPullStatus)
    embed_one = endpoint(embed_prompt, OllamaEmbedding, OllamaEmbeddingRequest, runs_model=True)
    return [
        Route("/api/version", endpoint(show_version, OllamaVersion, takes_json=False), methods=["GET"]),
        Route("/api/tags", endpoint(list_models, OllamaModels, takes_json=False), methods=["GET"]),
        Route("/api/ps", endpoint(list_running, OllamaModels, takes_json=False), methods=["GET"]),
        Route("/api/show", endpoint(show_model, OllamaShow, OllamaShowRequest), methods=["POST"]),
        Route("/api/pull", pull, methods=["POST"]),
        Route("/api/delete", endpoint(delete_model, (), OllamaShowRequest), methods=["DELETE"]),
        Route("/api/chat", chat, methods=["POST"]),
        Route("/api/generate", generate, methods=["POST"]),
        Route("/api/embed", embed, methods=["POST"]),
        Route("/api/embeddings", embed_one, methods=["POST"]),
    ]


async def show_version(_serving: OllamaServing, _call: Call) -> Reply:
    """Show the version of Ollama's API."""
    return Reply.json(OllamaVersion(API_VERSION))


async def list_models(serving: OllamaServing, _call: Call) -> Reply:
    """List the model for Ollama's clients."""
    return Reply.json(serving.tags())


async def list_running(serving: OllamaServing, _call: Call) -> Reply:
    """List the loaded model for Ollama's clients."""
    return Reply.json(serving.running())


async def show_model(serving: OllamaServing, call: Call) -> Reply:
    """Describe the model for Ollama's clients."""
    request = await decode_request(call.body, OllamaShowRequest, {})
    return Reply.json(serving.show(request.model or request.name or ""))


async def pull_model(serving: OllamaServing, call: Call) -> Reply:
    """Download a model from the hub, for a later server."""
    check_enabled(call.state.server_args.enable_pull)
    request = await decode_request(call.body, OllamaPullRequest, {})
    answer = await serving.pull(request, call.state.args)
    return Reply.json(answer) if isinstance(answer, OllamaPullStatus) else Reply(answer, content_type=LINES)


async def delete_model(serving: OllamaServing, call: Call) -> Reply:
    """Delete a downloaded model."""
    check_enabled(call.state.server_args.enable_pull)
    request = await decode_request(call.body, OllamaShowRequest, {})
    await serving.delete(request.model or request.name or "", call.state.args)
    return Reply(b"")


async def answer_chat(serving: OllamaServing, call: Call) -> Reply:
    """Answer a conversation in Ollama's form."""
    request = await decode_request(call.body, OllamaChatRequest, OLLAMA_REFUSED)
    answer = await serving.chat(request, call.caller)
    return Reply(answer, content_type=LINES) if isinstance(answer, EventStream) else Reply.json(answer)


async def answer_prompt(serving: OllamaServing, call: Call) -> Reply:
    """Answer a prompt in Ollama's form."""
    request = await decode_request(call.body, OllamaGenerateRequest, OLLAMA_REFUSED)
    answer = await serving.generate(request, call.caller)
    return Reply(answer, content_type=LINES) if isinstance(answer, EventStream) else Reply.json(answer)


async def embed_texts(serving: OllamaServing, call: Call) -> Reply:
    """Make embeddings of texts in Ollama's form."""
    request = await decode_request(call.body, OllamaEmbedRequest, {})
    return Reply.json(await serving.embed(request, call.caller))


async def embed_prompt(serving: OllamaServing, call: Call) -> Reply:
    """Make the embedding of one text in Ollama's older form."""
    request = await decode_request(call.body, OllamaEmbeddingRequest, {})
    return Reply.json(await serving.embed_prompt(request, call.caller))


def refusal(error: BaseException, _request_id: str) -> Reply:
    """Return the answer to a failed request in Ollama's form."""
    response = error_response(error)
    reply = Reply.json(OllamaError(response.error.message), response.error.code)
    return reply._replace(headers=tuple(error_headers(response)))
