"""Serve decisions: a request in either form becomes one decision of the engine."""

from __future__ import annotations

from typing import Any

from jaxllm.decisions import DecisionOutput
from jaxllm.server.decisions.fields import fields_named
from jaxllm.server.decisions.openai_protocol import DecisionRequest, DecisionResponse
from jaxllm.server.decisions.systemone_protocol import SystemOneRequest, SystemOneResponse
from jaxllm.server.http.caller import Caller
from jaxllm.server.openai.model_tasks import check_generates
from jaxllm.server.openai.serving_chat import OpenAIServingChat


class ServingDecisions:
    """Answers decisions on the engine behind `chat`."""

    def __init__(self, chat: OpenAIServingChat) -> None:
        self.engine_client, self.models, self._args = chat.engine_client, chat.models, chat.args

    async def answer_systemone(self, request: SystemOneRequest, caller: Caller) -> SystemOneResponse:
        """Answer a request in vLLM's form. Raises exceptions that `error_response` handles."""
        with fields_named("state", "images"):
            output = await self._decide(request, request.state, request.image_parts(), caller)
        return SystemOneResponse.of(
            output, caller.shown_id("decision", request.request_id), self.models.shown(request.model)
        )

    async def answer_decision(self, request: DecisionRequest, caller: Caller) -> DecisionResponse:
        """Answer a request in OpenAI's form. Raises exceptions that `error_response` handles."""
        with fields_named("input", "input"):
            output = await self._decide(request, request.state(), request.image_parts(), caller)
        return DecisionResponse.of(output, request, self.models.shown(request.model))

    async def _decide(
        self, request: SystemOneRequest | DecisionRequest, state: Any, images: list[Any], caller: Caller
    ) -> DecisionOutput:
        check_generates(self.engine_client, "Decisions")
        self.models.check(request.model)
        return await self.engine_client.decide(
            state,
            request.questions_asked(),
            caller.request_id,
            request.options(self._args, images),
            lora_request=self.models.adapter(request.model),
            trace_headers=caller.trace_headers,
            priority=request.priority,
            data_parallel_rank=caller.data_parallel_rank,
        )
