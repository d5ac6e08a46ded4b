"""SageMaker's route, which takes the requests of several others: their fields tell which one is meant.

See https://docs.aws.amazon.com/sagemaker/latest/dg/your-algorithms-inference-code.html.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from starlette.routing import BaseRoute, Route

from jaxllm.exceptions import VLLMValidationError
from jaxllm.server.http.decoding import field_names
from jaxllm.server.http.endpoint import Call, Endpoint, ModelEndpoint, Reply, Types
from jaxllm.server.openapi import several

type Endpoints = Mapping[str, Endpoint[Any]]

_GENERATING = {
    "messages": "/v1/chat/completions",
    "prompt": "/v1/completions",
    "prompt_embeds": "/v1/completions",
}
"""The routes of models that generate, by a field of their requests; the first that a request has decides."""
_POOLING = {
    "documents": "/rerank",
    "text_1": "/score",
    "data_1": "/score",
    "queries": "/score",
    "messages": "/pooling",
    "input": "/pooling",
}
"""The same for pooling models."""
_BY_TASK = {"embed": "/v1/embeddings", "token_embed": "/v1/embeddings", "classify": "/classify"}
"""The routes of requests that have no task, by the task of a pooling model."""


def routes(others: Iterable[BaseRoute]) -> list[Route]:
    """Return the route, which answers as those of `others` do that it names."""
    endpoints = {
        each.path: each.endpoint for each in others if isinstance(each, Route) and isinstance(each.endpoint, Endpoint)
    }
    named = {path: endpoints[path] for path in {*_GENERATING.values(), *_POOLING.values(), *_BY_TASK.values()}}
    types = [each.types for each in named.values() if each.types is not None]
    kinds = dict.fromkeys(kind for each in types for kind in several(each.response))
    events = dict.fromkeys(each.event for each in types if each.event is not None)
    described = Types(tuple(kinds), dict[str, Any], tuple(events))
    return [Route("/invocations", ModelEndpoint(invoke, lambda _: named, described, runs_model=True), methods=["POST"])]


async def invoke(endpoints: Endpoints, call: Call) -> Reply:
    """Answer as the route does that a request is meant for."""
    names, ready = field_names(call.body), call.engine_client.front.ready
    paths = _GENERATING if ready.generates else _POOLING
    path = next((path for name, path in paths.items() if name in names), None)
    if path is None:
        message = f"a request to this model has one of the fields {', '.join(paths)}."
        raise VLLMValidationError(message, parameter=next(iter(paths)))
    if path == "/pooling" and "task" not in names:
        tasks = () if ready.pooling is None else ready.pooling.tasks
        path = next((route for task, route in _BY_TASK.items() if task in tasks), path)
    return await endpoints[path].reply(call)
