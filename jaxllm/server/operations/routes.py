"""The routes for operators: health, load, metrics and version."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from prometheus_client.registry import CollectorRegistry
from starlette.routing import Route

from jaxllm.server.http.endpoint import Call, Endpoint, Reply
from jaxllm.server.http.state import ServerState, check_serving
from jaxllm.server.operations.prometheus import show
from jaxllm.version import __version__

OPEN_PATHS = frozenset({"/health", "/livez", "/ping", "/version"})
"""These routes need no key."""


type GatherMetrics = Callable[[], Awaitable[CollectorRegistry]]
"""A function that returns a registry of all metrics."""


def routes(state: ServerState | Any, gather: Callable[[], GatherMetrics]) -> list[Route]:
    """Return the routes; `gather` returns how metrics are gathered. `state` must have its models before the first
    request.
    """
    return [
        Route("/health", Endpoint(check_health, lambda: state, takes_json=False), methods=["GET"]),
        Route("/ping", Endpoint(ping, lambda: state, takes_json=False), methods=["GET", "POST"]),
        Route("/livez", Endpoint(check_life, lambda: state, takes_json=False), methods=["GET"]),
        Route("/load", Endpoint(show_load, lambda: state, takes_json=False), methods=["GET"]),
        Route("/metrics", Endpoint(show_metrics, gather, takes_json=False), methods=["GET"]),
        Route("/version", Endpoint(show_version, lambda: __version__, takes_json=False), methods=["GET"]),
    ]


async def check_health(state: ServerState, _call: Call) -> Reply:
    """Check readiness: 503 while the server drains or its engine sleeps, 500 once it has ended.

    With several models it is 503 if all have failed.
    """
    await check_serving(state)
    return Reply(b"")


async def ping(state: ServerState, call: Call) -> Reply:
    """Check readiness like /health, for SageMaker."""
    return await check_health(state, call)


async def check_life(state: ServerState, _call: Call) -> Reply:
    """Check liveness: 500 once the only engine has ended."""
    state.models.check_alive()
    return Reply(b"")


async def show_load(state: ServerState, _call: Call) -> Reply:
    """Show the number of running requests."""
    return Reply.json({"server_load": state.load.total()})


async def show_metrics(gather: GatherMetrics, call: Call) -> Reply:
    """Show the metrics, in Prometheus' or OpenMetrics' form."""
    registry = await gather()
    page, content_type = show(registry, call.headers.get(b"accept", b"").decode("latin-1"))
    return Reply(page, content_type=content_type.encode())


async def show_version(version: str, _call: Call) -> Reply:
    """Show the version."""
    return Reply.json({"version": version})
