"""Serve generation from token ids: nothing is tokenized, and only stop strings need texts."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from msgspec import UNSET

from jaxllm.outputs import CompletionOutput, RequestOutput
from jaxllm.sampling_params import SamplingParams
from jaxllm.server.http.caller import Caller
from jaxllm.server.http.several import read_all
from jaxllm.server.http.sse import EngineOutputs, EventStream, event
from jaxllm.server.openai.logprobs import chat_logprobs, prompt_logprobs
from jaxllm.server.openai.model_tasks import check_generates
from jaxllm.server.openai.sampling_fields import StreamOptions
from jaxllm.server.openai.serving_chat import OpenAIServingChat
from jaxllm.server.openai.usage import PromptTokensDetails, make_usage
from jaxllm.server.tokens.protocol import (
    GenerateRequest,
    GenerateResponse,
    GenerateResponseChoice,
    GenerateStreamResponse,
)


class ServingTokens:
    """Answers `/inference/v1/generate`."""

    def __init__(self, chat: OpenAIServingChat) -> None:
        """Answer with the engine, the models and the settings of `chat`."""
        self._engine, self._models, self._args = chat.engine_client, chat.models, chat.args

    async def answer(self, request: GenerateRequest, caller: Caller) -> EventStream | GenerateResponse:
        """Answer a request; a stream is returned once it is admitted.

        Raises exceptions that `error_response` handles.
        """
        check_generates(self._engine, "Generate")
        self._models.check(request.model)
        shown_id = caller.shown_id("generate-tokens", request.request_id)
        with request.fields_named():
            params = request.params(self._engine.front.ready)
            self._engine.admission.check_room(params.n)
            outputs = await self._queue(request, params, caller)
        if request.stream:
            return EventStream(self._events(request, params, shown_id, outputs), outputs)
        [final] = await read_all([outputs])
        tokens = sum(len(each.token_ids) for each in final.outputs)
        return GenerateResponse(
            id=shown_id,
            request_id=shown_id,
            model=self._models.shown(request.model),
            choices=[_choice(each, params) for each in final.outputs],
            usage=make_usage(len(final.prompt_token_ids or ()), tokens, self._details(final)),
            prompt_logprobs=prompt_logprobs(final.prompt_logprobs),
        )

    async def _queue(self, request: GenerateRequest, params: SamplingParams, caller: Caller) -> EngineOutputs:
        prompt: dict[str, Any] = {"prompt_token_ids": request.token_ids}
        if request.cache_salt is not None:
            prompt["cache_salt"] = request.cache_salt
        stream = await self._engine.add_request(
            caller.request_id,
            prompt,
            params,
            trace_headers=caller.trace_headers,
            priority=request.priority,
            data_parallel_rank=caller.data_parallel_rank,
            lora_request=self._models.adapter(request.model),
        )
        return EngineOutputs(self._engine, stream)

    async def _events(
        self, request: GenerateRequest, params: SamplingParams, shown_id: str, outputs: EngineOutputs
    ) -> AsyncGenerator[bytes, None]:
        """Yield the events of a stream, one for each answer's new tokens."""
        ends_in_usage, has_usage = (request.stream_options or StreamOptions()).tells_usage()
        num_tokens = 0
        async for ping in outputs.pings(self._args.sse_ping_interval):
            yield ping
        async for output in outputs:
            num_tokens += sum(len(each.token_ids) for each in output.outputs)
            usage = make_usage(len(output.prompt_token_ids or ()), num_tokens, self._details(output))
            shown = usage if has_usage else UNSET
            pieces = [
                GenerateStreamResponse(request_id=shown_id, choices=[_choice(each, params)], usage=shown)
                for each in output.outputs
            ]
            if output.finished and ends_in_usage:
                pieces.append(GenerateStreamResponse(request_id=shown_id, choices=[], usage=usage))
            yield b"".join(map(event, pieces))

    def _details(self, output: RequestOutput) -> PromptTokensDetails | None:
        return PromptTokensDetails.of(output) if self._args.enable_prompt_tokens_details else None


def _choice(output: CompletionOutput, params: SamplingParams) -> GenerateResponseChoice:
    logprobs = None
    if output.logprobs is not None:
        logprobs = chat_logprobs(output.token_ids, output.logprobs, params.logprobs, as_token_ids=True)
    return GenerateResponseChoice(
        index=output.index,
        token_ids=list(output.token_ids),
        logprobs=logprobs,
        finish_reason=output.finish_reason,
        stop_reason=output.stop_reason,
    )
