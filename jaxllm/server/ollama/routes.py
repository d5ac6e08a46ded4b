"""Ollama's routes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from starlette.routing import Route

from jaxllm.server.http.decoding import decode_request, peek
from jaxllm.server.http.endpoint import Call, Endpoint, ModelEndpoint, Reply, Send, Types, send_reply
from jaxllm.server.http.errors import error_headers, error_response
from jaxllm.server.http.sse import AnswerRelay, EventStream
from jaxllm.server.models.registry import ServedModels
from jaxllm.server.ollama.answers import AnswerBuilder
from jaxllm.server.ollama.keep_alive import read_keep_alive
from jaxllm.server.ollama.library import OllamaLibrary
from jaxllm.server.ollama.listing import describe, names_in_json, running, tags
from jaxllm.server.ollama.protocol import (
    OLLAMA_REFUSED,
    OllamaAnswer,
    OllamaChatRequest,
    OllamaEmbedAnswer,
    OllamaEmbedding,
    OllamaEmbeddingRequest,
    OllamaEmbedFields,
    OllamaEmbedRequest,
    OllamaError,
    OllamaFields,
    OllamaGenerateRequest,
    OllamaModels,
    OllamaPullRequest,
    OllamaPullStatus,
    OllamaShow,
    OllamaShowRequest,
    OllamaVersion,
)
from jaxllm.server.ollama.pulls import check_enabled
from jaxllm.server.ollama.serving import OllamaServing, asks_to_unload

LINES = b"application/x-ndjson"
API_VERSION = "0.12.0"
"""The version of Ollama that these routes implement. Clients check that it is new enough."""


class _TextEndpoint(ModelEndpoint[OllamaServing]):
    """A route for text, by which clients also load a model, or unload it: then it is not loaded first."""

    async def _answer(self, call: Call, send: Send, way: Callable[[], AnswerRelay] | None) -> None:
        answer = None
        try:
            if call.state.models.only is None:
                model = await self._find(call)
                request = peek(call.body, _Loading)
                if model.begin() is None:
                    answer = request.unloaded(is_chat=self._is_chat)
                else:
                    model.end()
        except Exception as error:  # noqa: BLE001 - each has an answer
            await send_reply(self.refusal(error, call.request_id), send)
            return
        if answer is None:
            await super()._answer(call, send, way)
        else:
            await send_reply(Reply.json(answer), send)

    @property
    def _is_chat(self) -> bool:
        return self.name == answer_chat.__name__


class _Loading(OllamaFields, kw_only=True):
    """The fields that tell a request for text from one that loads or unloads."""

    messages: list[msgspec.Raw] | None = None
    prompt: str | None = None

    def unloaded(self, *, is_chat: bool) -> OllamaAnswer | None:
        """Return the answer if it unloads a model that is not loaded; None if it asks for anything else."""
        if self.messages or self.prompt or not asks_to_unload(self):
            return None
        return AnswerBuilder(self.model, is_chat=is_chat).loaded(is_unloaded=True)


def routes(pick: Callable[[Any], OllamaServing], models: Callable[[], ServedModels[Any]]) -> list[Route]:
    """Return the routes: `pick` returns what answers for a model, and `models` the server's."""

    def typed(response: Any, request: Any = None, event: Any = None) -> Types:
        return Types(response, request, event, OllamaError, LINES.decode())

    def endpoint(handler: Any, response: Any, request: Any = None, **options: Any) -> Endpoint[Any]:
        return Endpoint(handler, models, typed(response, request), refusal=refusal, **options)

    options: dict[str, Any] = {"refusal": refusal, "runs_model": True, "names": names_in_json}
    chat = _TextEndpoint(answer_chat, pick, typed(OllamaAnswer, OllamaChatRequest, OllamaAnswer), **options)
    generate = _TextEndpoint(answer_prompt, pick, typed(OllamaAnswer, OllamaGenerateRequest, OllamaAnswer), **options)
    embed = ModelEndpoint(embed_texts, pick, typed(OllamaEmbedAnswer, OllamaEmbedRequest), **options)
    embed_one = ModelEndpoint(embed_prompt, pick, typed(OllamaEmbedding, OllamaEmbeddingRequest), **options)
    library = OllamaLibrary()
    pull_types = typed(OllamaPullStatus, OllamaPullRequest, OllamaPullStatus)
    pull = Endpoint(pull_model, lambda: library, pull_types, refusal=refusal)

    async def delete_model(models: ServedModels[Any], call: Call) -> Reply:
        """Delete a downloaded model."""
        check_enabled(call.state.server_args.enable_pull)
        request = await decode_request(call.body, OllamaShowRequest, {})
        await library.delete(request.model or request.name or "", models, call.state.args)
        return Reply(b"")

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


async def show_version(_models: ServedModels[Any], _call: Call) -> Reply:
    """Show the version of Ollama's API."""
    return Reply.json(OllamaVersion(API_VERSION))


async def list_models(models: ServedModels[Any], _call: Call) -> Reply:
    """List the models for Ollama's clients."""
    return Reply.json(tags(models))


async def list_running(models: ServedModels[Any], _call: Call) -> Reply:
    """List the loaded models for Ollama's clients."""
    return Reply.json(running(models))


async def show_model(models: ServedModels[Any], call: Call) -> Reply:
    """Describe a model for Ollama's clients."""
    request = await decode_request(call.body, OllamaShowRequest, {})
    return Reply.json(describe(models, request.model or request.name or ""))


async def pull_model(library: OllamaLibrary, call: Call) -> Reply:
    """Download a model from the hub, for a later server."""
    check_enabled(call.state.server_args.enable_pull)
    request = await decode_request(call.body, OllamaPullRequest, {})
    call.state.load.cut_offs.add(library.cut_off)
    answer = await library.pull(request, call.state.args)
    return Reply.json(answer) if isinstance(answer, OllamaPullStatus) else Reply(answer, content_type=LINES)


async def answer_chat(serving: OllamaServing, call: Call) -> Reply:
    """Answer a conversation in Ollama's form."""
    request = await decode_request(call.body, OllamaChatRequest, OLLAMA_REFUSED)
    _keep(call, request)
    answer = await serving.chat(request, call.caller)
    return Reply(answer, content_type=LINES) if isinstance(answer, EventStream) else Reply.json(answer)


async def answer_prompt(serving: OllamaServing, call: Call) -> Reply:
    """Answer a prompt in Ollama's form."""
    request = await decode_request(call.body, OllamaGenerateRequest, OLLAMA_REFUSED)
    _keep(call, request)
    answer = await serving.generate(request, call.caller)
    return Reply(answer, content_type=LINES) if isinstance(answer, EventStream) else Reply.json(answer)


async def embed_texts(serving: OllamaServing, call: Call) -> Reply:
    """Make embeddings of texts in Ollama's form."""
    request = await decode_request(call.body, OllamaEmbedRequest, {})
    _keep(call, request)
    return Reply.json(await serving.embed(request, call.caller))


async def embed_prompt(serving: OllamaServing, call: Call) -> Reply:
    """Make the embedding of one text in Ollama's older form."""
    request = await decode_request(call.body, OllamaEmbeddingRequest, {})
    _keep(call, request)
    return Reply.json(await serving.embed_prompt(request, call.caller))


def _keep(call: Call, request: OllamaFields | OllamaEmbedFields) -> None:
    """Let the model stay loaded for as long as a request asks. Raises VLLMValidationError for a wrong value."""
    if request.keep_alive is not None and call.state.models.only is None and call.model is not None:
        call.model.keep(read_keep_alive(request.keep_alive))


def refusal(error: BaseException, _request_id: str) -> Reply:
    """Return the answer to a failed request in Ollama's form."""
    response = error_response(error)
    reply = Reply.json(OllamaError(response.error.message), response.error.code)
    return reply._replace(headers=tuple(error_headers(response)))
