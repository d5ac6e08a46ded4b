"""Build the FastAPI application: its routes, its middleware and its state."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
from collections.abc import Iterator, Mapping
from functools import partial
from http import HTTPStatus
from operator import attrgetter
from typing import Any, cast

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.datastructures import State
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route

from jaxllm.config.environment import allows_lora_updates, is_server_in_dev_mode
from jaxllm.config.server_arguments import ServerArgs
from jaxllm.engine.online.async_llm import AsyncLLM
from jaxllm.exceptions import EngineBusyError, EngineDeadError, VLLMValidationError
from jaxllm.resolve.vllm_config import VllmConfig
from jaxllm.server import invocations
from jaxllm.server.anthropic import routes as anthropic
from jaxllm.server.cohere import routes as cohere
from jaxllm.server.decisions import routes as decisions
from jaxllm.server.http.auth import Authentication, KeyChecker, read_keys
from jaxllm.server.http.endpoint import Refusals, Reply
from jaxllm.server.http.errors import RequestFailedError
from jaxllm.server.http.middleware import RequestIdHeaders, RootPath, add_cors, add_own
from jaxllm.server.http.own_pages import OwnPages
from jaxllm.server.http.request_ids import new_request_id
from jaxllm.server.http.state import ServerLoad, ServerState
from jaxllm.server.models.entry import ModelEntry
from jaxllm.server.models.registry import ServedModels
from jaxllm.server.ollama import routes as ollama
from jaxllm.server.openai import routes as openai
from jaxllm.server.openai.output_parsers import check_parsers
from jaxllm.server.openapi import describe
from jaxllm.server.operations import adapter_routes, dev_routes
from jaxllm.server.operations import routes as operations
from jaxllm.server.operations.prometheus import (
    CoreProcesses,
    CountedRequests,
    EngineCollector,
    HttpMetrics,
    make_registry,
)
from jaxllm.server.page import routes as page
from jaxllm.server.pooling import routes as pooling
from jaxllm.server.responses import routes as responses
from jaxllm.server.responses.kept import KeptResponses
from jaxllm.server.served_model import ServedModel
from jaxllm.server.speech import routes as speech
from jaxllm.server.tokens import routes as tokens
from jaxllm.version import __version__

# The page's files are the same on every server and hold no data of it: the page asks for data with a key.
OPEN_PATHS = operations.OPEN_PATHS | page.PAGE_FILES.keys()
"""Paths that need no key; only exact matches count."""


def build_app(args: argparse.Namespace) -> FastAPI:
    """Return the application for a command line. It has no engine until `init_app_state` gives it one.

    Middleware that is added with `add_middleware`, and applications around this one, see every byte of answers.
    Whatever replaces `middleware_stack` does not see tokens of streams, which go straight to the connection.
    """
    server_args = ServerArgs.from_cli_args(args)
    check_parsers(server_args)
    docs: dict[str, Any] = {"openapi_url": None} if server_args.disable_fastapi_docs else {}
    app = FastAPI(title="jaxllm", version=__version__, **docs)
    app.state.args, app.state.server_args, app.state.kept_responses = (
        args,
        server_args,
        KeptResponses(server_args.sse_ping_interval),
    )
    _add_metrics(app)
    app.router.routes += _api_routes(app)
    app.router.routes += invocations.routes(app.routes)
    if not server_args.disable_page:
        app.router.routes += page.routes()
    if allows_lora_updates():
        app.router.routes += adapter_routes.routes(attrgetter("models"))
    if is_server_in_dev_mode():
        app.router.routes += dev_routes.routes()
    app.state.refusals = Refusals(app.routes)
    app.add_exception_handler(HTTPException, _answer_http_error)
    app.add_exception_handler(RequestValidationError, _answer_bad_query)
    app.add_exception_handler(Exception, _answer_error)
    for kind in (VLLMValidationError, EngineBusyError, EngineDeadError):  # the handler of Exception raises them again
        app.add_exception_handler(kind, _answer_error)
    keys = read_keys(server_args)
    app.add_middleware(CountedRequests, metrics=app.state.http_metrics, routes=app.routes)
    describe(app, OPEN_PATHS, has_keys=bool(keys))
    if keys:
        app.add_middleware(
            Authentication,
            checker=KeyChecker(keys),
            open_paths=OPEN_PATHS,
            refusals=app.state.refusals,
            root_path=server_args.root_path or "",
        )
    app.add_middleware(OwnPages, args=server_args, refusals=app.state.refusals, has_keys=bool(keys))
    add_cors(app, server_args)
    if server_args.enable_request_id_headers:
        app.add_middleware(RequestIdHeaders)
    if server_args.root_path is not None:
        app.add_middleware(RootPath, root_path=server_args.root_path)
    app.state.num_middleware = len(app.user_middleware)
    add_own(app, server_args.middleware or [])
    return app


def _api_routes(app: FastAPI) -> list[Route]:
    """Return the routes of all APIs: they look for the server's models in the application, and in a `ServedModel` for
    what answers.
    """

    def models() -> ServedModels[ServedModel]:
        return app.state.models

    return [
        *openai.routes(models, attrgetter("chat"), attrgetter("completion"), attrgetter("tokenization")),
        *responses.routes(attrgetter("responses"), app.state.kept_responses),
        *anthropic.routes(attrgetter("messages")),
        *cohere.routes(attrgetter("cohere_chat")),
        *ollama.routes(attrgetter("ollama"), models),
        *pooling.routes(attrgetter("pooled")),
        *speech.routes(attrgetter("transcription")),
        *decisions.routes(attrgetter("decisions")),
        *tokens.routes(attrgetter("tokens"), attrgetter("scoring")),
        *operations.routes(cast(ServerState, app.state), lambda: app.state.gather_metrics),
    ]


def _add_metrics(app: FastAPI) -> None:
    """Give an application the metrics of its process, which are all that it gathers unless it has other front ends."""
    registry = app.state.registry = make_registry()
    app.state.gather_metrics = partial(asyncio.sleep, 0, registry)
    app.state.http_metrics = HttpMetrics(registry)


async def _answer_http_error(request: Request, error: Exception) -> Response:
    """Answer 404 and 405 in the form of the path's neighbours."""
    assert isinstance(error, HTTPException)
    root_path = request.app.state.server_args.root_path or ""
    make = request.app.state.refusals.at(request.scope["path"].removeprefix(root_path))
    new_id, _ = new_request_id({})
    failed = RequestFailedError(HTTPStatus(error.status_code), str(error.detail))
    headers = {**(error.headers or {}), **_allowed_methods(request, error.status_code)}
    return _response(make(failed, request.scope.get("request_id", new_id)), headers)


def _allowed_methods(request: Request, status: int) -> dict[str, str]:
    """Return the header of a 405 with the methods of all routes at the path: Starlette's has those of one route."""
    if status != HTTPStatus.METHOD_NOT_ALLOWED:
        return {}
    routes = [each for each in request.app.routes if isinstance(each, Route)]
    methods = {name for each in routes if each.matches(request.scope)[0] != Match.NONE for name in each.methods or ()}
    return {"Allow": ", ".join(sorted(methods))}


async def _answer_bad_query(_request: Request, error: Exception) -> Response:
    """Answer in OpenAI's form to a bad query of FastAPI's routes."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    name = str(first["loc"][-1])
    return _response(Reply.error(VLLMValidationError(f"{name}: {first['msg']}.", parameter=name)), {})


async def _answer_error(_request: Request, error: Exception) -> Response:
    return _response(Reply.error(error), {})


def _response(reply: Reply, headers: Mapping[str, str]) -> Response:
    assert isinstance(reply.body, bytes)
    reply_headers = {name.decode(): value.decode() for name, value in reply.headers}
    return Response(reply.body, reply.status, {**reply_headers, **headers}, media_type="application/json")


def begin_state(state: State, args: argparse.Namespace, load: ServerLoad | None = None) -> None:
    """Give an application its arguments, and what counts its requests."""
    state.args, state.server_args, state.load = args, ServerArgs.from_cli_args(args), load or ServerLoad()


def sources_of(model: str, tokenizer: str | None, args: argparse.Namespace) -> list[str]:
    """Return what a model with these arguments needs of the hub: itself, its tokenizer and its draft model."""
    draft = getattr(args, "speculative_config", None)
    drafting = draft.get("model") if isinstance(draft, dict) else None
    return [each for each in (model, tokenizer, drafting) if each]


@contextlib.contextmanager
def counted_twice(load: ServerLoad, entry: ModelEntry[ServedModel]) -> Iterator[None]:
    """Count a response in the background as a request to the server, and to its model."""
    with load.counted(), entry.counted():
        yield


async def init_app_state(
    engine_client: AsyncLLM,
    vllm_config: VllmConfig,
    state: State,
    args: argparse.Namespace,
    *,
    load: ServerLoad | None = None,
    is_again: bool = False,
) -> None:
    """Give an application the engine that answers its routes, and what counts the requests to it.

    With `is_again` the engine has had an application before, and has the adapters of the start.
    """
    begin_state(state, args, load)
    names = getattr(args, "served_model_name", None) or [vllm_config.model_config.model]
    config = vllm_config.model_config
    entry: ModelEntry[ServedModel] = ModelEntry.pinned(names, sources_of(config.model, config.tokenizer, args))
    kept: KeptResponses = state.kept_responses
    counted = partial(counted_twice, state.load, entry)
    record = await ServedModel.make(engine_client, vllm_config, args, kept, counted, is_again=is_again)
    entry.pin(record)
    state.models = ServedModels.single(entry)
    state.registry.register(EngineCollector(engine_client, state.server_args.metrics_prefix))
    state.registry.register(CoreProcesses(engine_client))
    # Programs that were written for vLLM find these by their names there; no route does.
    state.engine_client, state.vllm_config = engine_client, vllm_config
    state.openai_serving_models, state.openai_serving_chat = record.models, record.chat
    state.openai_serving_completion, state.openai_serving_tokenization = record.completion, record.tokenization
