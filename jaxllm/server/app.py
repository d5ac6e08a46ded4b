"""The application: its routes, what goes around them, and what they share."""

from __future__ import annotations

import argparse
from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from jaxllm.config.vllm_config import VllmConfig
from jaxllm.engine.async_llm import AsyncLLM
from jaxllm.server import routes_openai, routes_operations
from jaxllm.server.arguments import ServerArgs
from jaxllm.server.auth import Authentication, KeyChecker, read_keys
from jaxllm.server.endpoint import Reply
from jaxllm.server.errors import make_error
from jaxllm.server.metrics import CountedRequests, EngineCollector, HttpMetrics, make_registry
from jaxllm.server.openapi import describe
from jaxllm.server.serving_chat import OpenAIServingChat
from jaxllm.server.serving_completion import OpenAIServingCompletion
from jaxllm.server.serving_models import OpenAIServingModels
from jaxllm.server.serving_tokenization import OpenAIServingTokenization
from jaxllm.server.state import ServerLoad, ServerState
from jaxllm.version import __version__


def build_app(args: argparse.Namespace) -> FastAPI:
    """Return the application of a command line, as yet without an engine: `init_app_state` gives it one."""
    server_args = ServerArgs.from_cli_args(args)
    docs: dict[str, Any] = {"openapi_url": None} if server_args.disable_fastapi_docs else {}
    app = FastAPI(title="jaxllm", version=__version__, root_path="", **docs)
    app.state.args, app.state.server_args = args, server_args
    app.state.registry = make_registry()
    app.router.routes += [*routes_openai.routes(server_args), *routes_operations.routes(server_args)]
    app.add_exception_handler(HTTPException, _answer_http_error)
    keys = read_keys(server_args)
    app.add_middleware(CountedRequests, metrics=HttpMetrics(app.state.registry), routes=app.routes)
    describe(app, has_keys=bool(keys))
    if keys:
        app.add_middleware(Authentication, checker=KeyChecker(keys))
    return app


async def _answer_http_error(_request: Request, error: Exception) -> Response:
    """Answer in OpenAI's form where no route is, or not for this method."""
    assert isinstance(error, HTTPException)
    reply = Reply.error(make_error(error.status_code, str(error.detail)))
    assert isinstance(reply.body, bytes)
    return Response(reply.body, reply.status, dict(error.headers or {}), media_type="application/json")


async def init_app_state(
    engine_client: AsyncLLM, vllm_config: VllmConfig, state: ServerState | Any, args: argparse.Namespace
) -> None:
    """Give an application's state what its routes need of an engine."""
    state.args, state.server_args = args, ServerArgs.from_cli_args(args)
    state.engine_client, state.vllm_config = engine_client, vllm_config
    state.load = ServerLoad()
    state.registry.register(EngineCollector(engine_client, state.server_args.metrics_prefix))
    state.openai_serving_models = OpenAIServingModels(
        vllm_config.model_config, getattr(args, "served_model_name", None)
    )
    state.openai_serving_chat = OpenAIServingChat(engine_client, state.openai_serving_models, state.server_args)
    state.openai_serving_completion = OpenAIServingCompletion(
        engine_client, state.openai_serving_models, state.server_args
    )
    state.openai_serving_tokenization = OpenAIServingTokenization(state.openai_serving_chat, state.server_args)
