"""The routes of decisions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from starlette.routing import Route

from jaxllm.server.decisions.openai_protocol import DECISIONS_REFUSED, DecisionRequest, DecisionResponse
from jaxllm.server.decisions.serving import ServingDecisions
from jaxllm.server.decisions.systemone_protocol import SYSTEMONE_REFUSED, SystemOneRequest, SystemOneResponse
from jaxllm.server.http.decoding import decode_request
from jaxllm.server.http.endpoint import Call, ModelEndpoint, Reply, Types


def routes(pick: Callable[[Any], ServingDecisions]) -> list[Route]:
    """Return the routes, which any model has: one that does not generate refuses their requests. `pick` returns what
    answers for a model.
    """
    systemone = ModelEndpoint(answer_systemone, pick, Types(SystemOneResponse, SystemOneRequest), runs_model=True)
    decision = ModelEndpoint(answer_decision, pick, Types(DecisionResponse, DecisionRequest), runs_model=True)
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
