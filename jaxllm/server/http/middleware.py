"""Middleware around the application: CORS, request ids, the root path, and users' own."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from jaxllm.config.server_arguments import ServerArgs
from jaxllm.exceptions import VLLMValidationError
from jaxllm.server.http.endpoint import ASGIApp, Receive, Scope, Send
from jaxllm.server.http.request_ids import new_request_id

_ALL_METHODS = ["GET", "POST", "OPTIONS"]


class RequestIdHeaders:
    """ASGI middleware: every answer has the request's id in X-Request-Id."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on. Its id is the client's if well formed, else a new one."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        new_id, client_id = new_request_id(dict(scope["headers"]))
        scope["request_id"] = new_id
        header = (b"x-request-id", (client_id or new_id).encode())

        async def add_header(message: dict[str, Any]) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], header]}
            await send(message)

        await self._app(scope, receive, add_header)


class RootPath:
    """An ASGI application around another, accepts paths with and without a proxy's prefix."""

    def __init__(self, app: ASGIApp, root_path: str) -> None:
        self._app, self._root_path = app, root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on."""
        await self._app({**scope, "root_path": self._root_path}, receive, send)


def add_cors(app: FastAPI, args: ServerArgs) -> None:
    """Let pages of the allowed origins use the application."""
    if args.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=args.allowed_origins,
            allow_credentials=args.allow_credentials,
            allow_methods=args.allowed_methods or _ALL_METHODS,
            allow_headers=args.allowed_headers or ["*"],
            expose_headers=["X-Request-Id"],
        )


def add_own(app: FastAPI, names: list[str]) -> None:
    """Add users' middleware: ASGI classes, or async functions `(request, call_next)`.

    Raises VLLMValidationError for a name that is neither.
    """
    for name in names:
        middleware: Any = _find(name)
        if isinstance(middleware, type):
            app.add_middleware(middleware)
        elif inspect.iscoroutinefunction(middleware):
            app.middleware("http")(middleware)
        else:
            message = f"middleware={name!r} is neither a class nor an async function."
            raise VLLMValidationError(message, parameter="middleware", value=name)


def _find(name: str) -> Any:
    module, _, attribute = name.rpartition(".")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        message = f"middleware={name!r} cannot be imported: {error}. Give MODULE.NAME of what Python can import."
        raise VLLMValidationError(message, parameter="middleware", value=name) from error
