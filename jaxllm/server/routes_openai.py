"""OpenAI's routes, and vLLM's for tokens."""

from __future__ import annotations

from starlette.routing import Route

from jaxllm.server.arguments import ServerArgs
from jaxllm.server.endpoint import Call, Endpoint, Reply


def routes(args: ServerArgs) -> list[Route]:
    """Return the routes."""
    del args
    return [Route("/v1/models", Endpoint(show_models, takes_json=False), methods=["GET"])]


async def show_models(call: Call) -> Reply:
    """List the names that the model goes by."""
    return Reply.json(call.state.openai_serving_models.show())
