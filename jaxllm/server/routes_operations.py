"""Routes for those who run a server: its health, version, load and metrics."""

from __future__ import annotations

from prometheus_client.exposition import choose_encoder
from starlette.routing import Route

from jaxllm.server.arguments import ServerArgs
from jaxllm.server.endpoint import Call, Endpoint, Reply
from jaxllm.version import __version__


def routes(args: ServerArgs) -> list[Route]:
    """Return the routes."""
    del args
    return [
        Route("/health", Endpoint(check_health, takes_json=False), methods=["GET"]),
        Route("/metrics", Endpoint(show_metrics, takes_json=False), methods=["GET"]),
        Route("/version", Endpoint(show_version, takes_json=False), methods=["GET"]),
    ]


async def check_health(call: Call) -> Reply:
    """Answer 200 while the engine is well and requests are taken."""
    await call.state.engine_client.check_health()
    return Reply(b"")


async def show_metrics(call: Call) -> Reply:
    """Show the metrics, in the form of Prometheus that is asked for."""
    encode, content_type = choose_encoder(call.headers.get(b"accept", b"").decode("latin-1"))
    return Reply(encode(call.state.registry), content_type=content_type.encode())


async def show_version(_call: Call) -> Reply:
    """Say which version this is."""
    return Reply.json({"version": __version__})
