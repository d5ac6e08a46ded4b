"""The routes of decisions."""

from __future__ import annotations

from collections.abc import Callable

from starlette.routing import Route

from jaxllm.server.decisions.openai_protocol import DECISIONS_REFUSED, DecisionRequest, DecisionResponse
from jaxllm.server.decisions.serving import ServingDecisions
from jaxllm.server.decisions.systemone_protocol import SYSTEMONE_REFUSED, SystemOneRequest, SystemOneResponse
from jaxllm.server.http.decoding import decode_request
from jaxllm.server.http.endpoint import Call, Endpoint, Reply, Types
from jaxllm.server.http.state import ServerLoad
from jaxllm.server.openai.serving_chat import OpenAIServingChat


def make_serving(chat: OpenAIServingChat, _load: ServerLoad) -> ServingDecisions:
    """Return the object that answers the routes; `chat` has the engine and the names of models."""
    return ServingDecisions(chat)


def routes(serving: Callable[[], ServingDecisions]) -> list[Route]:
    """Return the routes, which any model has: one that does not generate refuses their requests."""
    systemone = Endpoint(answer_systemone, serving, Types(SystemOneResponse, SystemOneRequest), runs_model=True)
    decision = Endpoint(answer_decision, serving, Types(DecisionResponse, DecisionRequest), runs_model=True)
    return [
        Route("/v1/systemone", systemone, methods=["POST"]),
        Route("/v1/decisions", decision, methods=["POST"]),
    ]


async def answer_systemone(serving: ServingDecisions, call: Call) -> Reply:
    """Answer questions about a state with probabilities, in the form of vLLM."""
    request = await decode_request(call.body, SystemOneRequest, SYSTEMONE_REFUSED)
    return Reply.json(await serving.answer_systemone(request, call.caller))


async def answer_decision(serving: ServingDecisions, call: Call) -> Reply:
    """Answer questions about an input with probabilities, in OpenAI's form."""
    request = await decode_request(call.body, DecisionRequest, DECISIONS_REFUSED)
    return Reply.json(await serving.answer_decision(request, call.caller))
