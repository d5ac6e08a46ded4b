"""Routes for those who run a server: whether it is well, what it has in hand, its metrics and its version."""

from __future__ import annotations

from starlette.routing import Route

from jaxllm.exceptions import EngineDeadError
from jaxllm.server.http.endpoint import Call, Endpoint, Reply
from jaxllm.server.operations.prometheus import show
from jaxllm.server.state import check_serving
from jaxllm.version import __version__


def routes() -> list[Route]:
    """Return the routes."""
    return [
        Route("/health", Endpoint(check_health, takes_json=False), methods=["GET"]),
        Route("/ping", Endpoint(ping, takes_json=False), methods=["GET", "POST"]),
        Route("/livez", Endpoint(check_life, takes_json=False), methods=["GET"]),
        Route("/load", Endpoint(show_load, takes_json=False), methods=["GET"]),
        Route("/metrics", Endpoint(show_metrics, takes_json=False), methods=["GET"]),
        Route("/version", Endpoint(show_version, takes_json=False), methods=["GET"]),
    ]


async def check_health(call: Call) -> Reply:
    """Say whether requests are taken: 503 while the server drains or the engine sleeps, 500 once it has ended."""
    await check_serving(call.state)
    return Reply(b"")


async def ping(call: Call) -> Reply:
    """Say the same as /health, for SageMaker."""
    return await check_health(call)


async def check_life(call: Call) -> Reply:
    """Say whether the server is worth keeping, be it drained or asleep: 500 once the engine has ended."""
    if call.state.engine_client.is_stopped:
        raise EngineDeadError("The engine has ended.")
    return Reply(b"")


async def show_load(call: Call) -> Reply:
    """Say how many requests that run the model are in hand."""
    return Reply.json({"server_load": call.state.load.num_requests})


async def show_metrics(call: Call) -> Reply:
    """Show the metrics, in the form of Prometheus that is asked for."""
    page, content_type = show(call.state.registry, call.headers.get(b"accept", b"").decode("latin-1"))
    return Reply(page, content_type=content_type.encode())


async def show_version(_call: Call) -> Reply:
    """Say which version this is."""
    return Reply.json({"version": __version__})
