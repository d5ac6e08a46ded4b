"""The OpenAPI document, with the routes that FastAPI does not know."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from starlette.routing import BaseRoute, Route

from jaxllm.server.http.endpoint import Endpoint
from jaxllm.server.http.errors import ErrorResponse

REFERENCE = "#/components/schemas/{name}"


def describe(app: FastAPI, open_paths: Container[str], *, has_keys: bool) -> None:
    """Let `app.openapi` describe the routes that the application has at its first call.

    With `has_keys`, all but those at `open_paths` need a key.
    """

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _document(app, open_paths, has_keys=has_keys)
        return app.openapi_schema

    app.openapi = openapi


def described_types(routes: Iterable[BaseRoute]) -> list[Any]:
    """Return the types of all requests and answers, each once."""
    endpoints = [route.endpoint for route in routes if isinstance(route, Route)]
    types = [endpoint.types for endpoint in endpoints if isinstance(endpoint, Endpoint) and endpoint.types is not None]
    kinds = [kind for each in types for part in each[:4] for kind in several(part) if kind is not None]
    return list(dict.fromkeys([ErrorResponse, *kinds]))


def several(kinds: Any) -> tuple[Any, ...]:
    """Return the types that a route has in one role."""
    return kinds if isinstance(kinds, tuple) else (kinds,)


def _document(app: FastAPI, open_paths: Container[str], *, has_keys: bool) -> dict[str, Any]:
    document = get_openapi(title=app.title, version=app.version, routes=app.routes)
    kinds = described_types(app.routes)
    schemas, components = msgspec.json.schema_components(kinds, ref_template=REFERENCE)
    reference = dict(zip(kinds, schemas, strict=True))
    document.setdefault("components", {}).setdefault("schemas", {}).update(components)
    for operation in (each for path in document["paths"].values() for each in path.values()):
        operation["responses"].pop("422", None)  # FastAPI's form of errors, which no answer uses
        operation["responses"]["default"] = _failed(reference[ErrorResponse])
    for name in ("HTTPValidationError", "ValidationError"):
        document["components"]["schemas"].pop(name, None)
    taken: set[str] = set()
    for route in app.routes:
        if isinstance(route, Route) and route.include_in_schema and isinstance(route.endpoint, Endpoint):
            name, path = route.endpoint.name, route.path_format
            for method in sorted((route.methods or set()) - {"HEAD"}):
                operation = _operation(route, route.endpoint, open_paths, reference.__getitem__)
                operation = {"operationId": _operation_id(name, path, method, taken), **operation}
                document["paths"].setdefault(path, {})[method.lower()] = operation
    if has_keys:
        document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"key": []}]
    return document


def _operation_id(handler: str, path: str, method: str, taken: set[str]) -> str:
    """Return a unique name: the handler's, with the path if the handler has several."""
    name = f"{handler}_{method.lower()}"
    if name in taken:
        name = f"{handler}{path.replace('/', '_')}_{method.lower()}"
    taken.add(name)
    return name


def _operation(
    route: Route, endpoint: Endpoint[Any], open_paths: Container[str], schema: Callable[[Any], Any]
) -> dict[str, Any]:
    types = endpoint.types
    success: dict[str, Any] = {"description": "Successful Response"}
    operation: dict[str, Any] = {"summary": endpoint.summary}
    if route.path in open_paths:
        operation["security"] = []
    if route.param_convertors:
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in route.param_convertors
        ]
    if types is not None:
        content: dict[str, Any] = {}
        if several(types.response):
            content["application/json"] = {"schema": _any_of(types.response, schema)}
        if types.has_text:
            content["text/plain"] = {"schema": {"type": "string"}}
        if types.event is not None:  # a schema would describe the whole stream, which is impossible
            content[types.streams] = {"x-event": _any_of(types.event, schema)}
        if content:
            success["content"] = content
        if types.request is not None:
            body = {endpoint.body_kind: {"schema": schema(types.request)}}
            operation["requestBody"] = {"required": True, "content": body}
    error = ErrorResponse if types is None else types.error
    return {**operation, "responses": {"200": success, "default": _failed(schema(error))}}


def _any_of(kinds: Any, schema: Callable[[Any], Any]) -> dict[str, Any]:
    schemas = [schema(each) for each in several(kinds)]
    return schemas[0] if len(schemas) == 1 else {"anyOf": schemas}


def _failed(schema: Any) -> dict[str, Any]:
    return {"description": "An error", "content": {"application/json": {"schema": schema}}}
