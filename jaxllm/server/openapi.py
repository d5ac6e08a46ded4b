"""The OpenAPI document: the routes that FastAPI does not know have theirs from the types that they decode."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from starlette.routing import Route

from jaxllm.server.anthropic.protocol import MessagesError, MessagesRequest, MessagesResponse, TokenCount
from jaxllm.server.http.auth import OPEN_PATHS
from jaxllm.server.http.endpoint import Endpoint
from jaxllm.server.http.errors import ErrorResponse
from jaxllm.server.ollama.protocol import (
    OllamaAnswer,
    OllamaChatRequest,
    OllamaEmbedAnswer,
    OllamaEmbedding,
    OllamaEmbeddingRequest,
    OllamaEmbedRequest,
    OllamaError,
    OllamaGenerateRequest,
    OllamaModels,
    OllamaShow,
    OllamaShowRequest,
    OllamaVersion,
)
from jaxllm.server.openai.chat_protocol import (
    ChatCompletionRequest,
    ChatCompletionResponse,
    ChatCompletionStreamResponse,
)
from jaxllm.server.openai.completion_protocol import CompletionRequest, CompletionResponse, CompletionStreamResponse
from jaxllm.server.openai.serving_models import ModelCard, ModelList
from jaxllm.server.openai.tokenization_protocol import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
    TokenizerInfo,
)
from jaxllm.server.pooling.classification_protocol import ClassificationRequest, ClassificationResponse
from jaxllm.server.pooling.cohere_protocol import CohereEmbedRequest, CohereEmbedResponse
from jaxllm.server.pooling.embedding_protocol import EmbeddingRequest, EmbeddingResponse
from jaxllm.server.pooling.pooling_protocol import PoolingRequest, PoolingResponse
from jaxllm.server.pooling.routes import RERANK_PATHS, SCORE_PATHS
from jaxllm.server.pooling.scoring_protocol import RerankRequest, RerankResponse, ScoreRequest, ScoreResponse
from jaxllm.server.responses import routes as routes_responses
from jaxllm.server.responses.objects import DeletedResponse, Response
from jaxllm.server.responses.request import ResponsesRequest
from jaxllm.server.responses.stream import ResponseEvent

REFERENCE = "#/components/schemas/{name}"


class Types(NamedTuple):
    """What a route takes and gives."""

    response: Any
    request: Any = None
    event: Any = None
    """One event of the stream that the route gives instead, where it can."""
    error: Any = ErrorResponse
    streams: str = "text/event-stream"
    """The content type of the stream."""


TYPES: Mapping[str, Types] = {
    "/v1/chat/completions": Types(ChatCompletionResponse, ChatCompletionRequest, ChatCompletionStreamResponse),
    "/v1/completions": Types(CompletionResponse, CompletionRequest, CompletionStreamResponse),
    routes_responses.CREATE: Types(Response, ResponsesRequest, ResponseEvent),
    routes_responses.ONE: Types(Response),
    f"DELETE {routes_responses.ONE}": Types(DeletedResponse),
    routes_responses.CANCEL: Types(Response),
    "/v1/messages": Types(MessagesResponse, MessagesRequest, error=MessagesError),
    "/v1/messages/count_tokens": Types(TokenCount, MessagesRequest, error=MessagesError),
    "/api/chat": Types(OllamaAnswer, OllamaChatRequest, OllamaAnswer, OllamaError, "application/x-ndjson"),
    "/api/generate": Types(OllamaAnswer, OllamaGenerateRequest, OllamaAnswer, OllamaError, "application/x-ndjson"),
    "/api/embed": Types(OllamaEmbedAnswer, OllamaEmbedRequest, error=OllamaError),
    "/api/embeddings": Types(OllamaEmbedding, OllamaEmbeddingRequest, error=OllamaError),
    "/api/show": Types(OllamaShow, OllamaShowRequest, error=OllamaError),
    "/api/version": Types(OllamaVersion, error=OllamaError),
    **dict.fromkeys(("/api/tags", "/api/ps"), Types(OllamaModels, error=OllamaError)),
    "/v1/embeddings": Types(EmbeddingResponse, EmbeddingRequest),
    "/v2/embed": Types(CohereEmbedResponse, CohereEmbedRequest),
    "/pooling": Types(PoolingResponse, PoolingRequest),
    "/classify": Types(ClassificationResponse, ClassificationRequest),
    **dict.fromkeys(SCORE_PATHS, Types(ScoreResponse, ScoreRequest)),
    **dict.fromkeys(RERANK_PATHS, Types(RerankResponse, RerankRequest)),
    "/v1/models": Types(ModelList),
    "/v1/models/{model:path}": Types(ModelCard),
    "/tokenize": Types(TokenizeResponse, TokenizeRequest),
    "/detokenize": Types(DetokenizeResponse, DetokenizeRequest),
    "/tokenizer_info": Types(TokenizerInfo),
}
"""The types by the routes' paths, or methods and paths; other routes are named with what they are for."""


def describe(app: FastAPI, *, has_keys: bool) -> None:
    """Let `app.openapi` describe every route that the application has when it is first asked."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _document(app, has_keys=has_keys)
        return app.openapi_schema

    app.openapi = openapi


def _document(app: FastAPI, *, has_keys: bool) -> dict[str, Any]:
    document = get_openapi(title=app.title, version=app.version, routes=app.routes)
    kinds = [ErrorResponse, *(kind for types in TYPES.values() for kind in types[:4] if kind is not None)]
    schemas, components = msgspec.json.schema_components(kinds, ref_template=REFERENCE)
    reference = dict(zip(kinds, schemas, strict=True))
    document.setdefault("components", {}).setdefault("schemas", {}).update(components)
    for operation in (each for path in document["paths"].values() for each in path.values()):
        operation["responses"].pop("422", None)  # FastAPI's own form of errors, which no answer has
        operation["responses"]["default"] = _failed(reference[ErrorResponse])
    for name in ("HTTPValidationError", "ValidationError"):
        document["components"]["schemas"].pop(name, None)
    taken: set[str] = set()
    for route in app.routes:
        if isinstance(route, Route) and route.include_in_schema and isinstance(route.endpoint, Endpoint):
            name, path = route.endpoint.name, route.path_format
            for method in sorted((route.methods or set()) - {"HEAD"}):
                types = TYPES.get(f"{method} {route.path}", TYPES.get(route.path))
                operation = _operation(route, types, route.endpoint, reference.__getitem__)
                operation = {"operationId": _operation_id(name, path, method, taken), **operation}
                document["paths"].setdefault(path, {})[method.lower()] = operation
    if has_keys:
        document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"key": []}]
    return document


def _operation_id(handler: str, path: str, method: str, taken: set[str]) -> str:
    """Return a name that no other operation has: that of its handler, with the path where the handler has several."""
    name = f"{handler}_{method.lower()}"
    if name in taken:
        name = f"{handler}{path.replace('/', '_')}_{method.lower()}"
    taken.add(name)
    return name


def _operation(route: Route, types: Types | None, endpoint: Endpoint, schema: Callable[[Any], Any]) -> dict[str, Any]:
    found: dict[str, Any] = {"description": "Successful Response"}
    operation: dict[str, Any] = {"summary": endpoint.summary}
    if route.path in OPEN_PATHS:
        operation["security"] = []
    if route.param_convertors:
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in route.param_convertors
        ]
    if types is not None:
        content = {"application/json": {"schema": schema(types.response)}}
        if types.event is not None:  # a schema would be of the whole stream, which none can describe
            content[types.streams] = {"x-event": schema(types.event)}
        found["content"] = content
        if types.request is not None:
            body = {"application/json": {"schema": schema(types.request)}}
            operation["requestBody"] = {"required": True, "content": body}
    error = ErrorResponse if types is None else types.error
    return {**operation, "responses": {"200": found, "default": _failed(schema(error))}}


def _failed(schema: Any) -> dict[str, Any]:
    return {"description": "An error", "content": {"application/json": {"schema": schema}}}
