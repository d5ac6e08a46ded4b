"""Serve text completions: queue each prompt as an engine request, and join their outputs in one answer."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from jaxllm.config.server_arguments import ServerArgs
from jaxllm.engine.online.async_llm import AsyncLLM
from jaxllm.outputs import RequestOutput
from jaxllm.server.http.caller import Caller
from jaxllm.server.http.errors import ErrorResponse, error_response
from jaxllm.server.http.request_ids import headers_of, new_request_id
from jaxllm.server.http.several import merge, queue_all, read_all
from jaxllm.server.http.sse import EngineOutputs, EventStream, TextFrame, event
from jaxllm.server.openai.completion_choices import PromptChoices
from jaxllm.server.openai.completion_protocol import (
    CompletionRequest,
    CompletionResponse,
    CompletionResponseChoice,
    CompletionStreamResponse,
)
from jaxllm.server.openai.model_tasks import check_generates
from jaxllm.server.openai.serving_models import OpenAIServingModels
from jaxllm.server.openai.usage import PromptTokensDetails, UsageInfo, make_usage


class OpenAIServingCompletion:
    """Answers text completions."""

    def __init__(self, engine_client: AsyncLLM, models: OpenAIServingModels, args: ServerArgs) -> None:
        self.engine_client = engine_client
        self.models = models
        self._args = args

    async def create_completion(
        self, request: CompletionRequest, raw_request: Any = None
    ) -> AsyncGenerator[bytes, None] | CompletionResponse | ErrorResponse:
        """Answer a request, like vLLM's method. A stream yields its events as bytes and must be closed."""
        headers = headers_of(raw_request)
        try:
            return await self.answer(request, Caller.of(self.engine_client, headers, *new_request_id(headers)))
        except Exception as error:  # noqa: BLE001 - each has an answer
            return error_response(error)

    async def answer(self, request: CompletionRequest, caller: Caller) -> EventStream | CompletionResponse:
        """Answer a request. The engine's ids are the caller's `request_id` and the prompt's number. A stream is
        returned once all prompts are admitted.

        Raises what `admit` does, and what ends a request.
        """
        outputs = await self.admit(request, caller)
        shown_id = caller.shown_id("cmpl", request.request_id)
        answer = _Answer(request, self._args, shown_id, self.models.shown(request.model))
        choices = [self._choices(request, i) for i in range(len(outputs))]
        if request.stream:
            return EventStream(answer.frames(outputs, choices), *outputs)
        with request.fields_named("prompt"):
            finals = await read_all(outputs)
        shown = [choice for each, final in zip(choices, finals, strict=True) for choice in each.of(final)]
        return answer.whole(shown, choices)

    async def admit(self, request: CompletionRequest, caller: Caller) -> list[EngineOutputs]:
        """Check a request and queue all its prompts, or none; return the outputs for each, which must be closed.

        Raises exceptions that `error_response` handles.
        """
        check_generates(self.engine_client, "Completions")
        self.models.check(request.model)
        request.check()
        prompts = request.prompts()
        self.engine_client.admission.check_room(request.num_sequences(len(prompts)))  # before any of them is tokenized
        with request.fields_named("prompt"):
            return await self._begin(request, prompts, caller)

    def _choices(self, request: CompletionRequest, prompt: int) -> PromptChoices:
        as_ids = request.shows_token_ids(self._args.return_tokens_as_token_ids)
        n = 1 if request.n is None else request.n
        return PromptChoices(request, prompt * n, self.engine_client.front.tokenizer, as_token_ids=as_ids)

    async def _begin(
        self, request: CompletionRequest, prompts: Sequence[dict[str, Any]], caller: Caller
    ) -> list[EngineOutputs]:
        """Queue all prompts, or none."""
        params = request.sampling_params(
            self.engine_client.front.ready,
            max_tokens=1 if request.only_scores else request.max_tokens,
            logprobs=request.logprobs,
            prompt_logprobs=request.logprobs if request.echo else None,
        )
        requests = (
            self.engine_client.add_request(
                f"{caller.request_id}-{i}",
                prompt,
                params,
                tokenization_kwargs=request.tokenization_kwargs(),
                trace_headers=caller.trace_headers,
                priority=request.priority,
                data_parallel_rank=caller.data_parallel_rank,
                lora_request=self.models.adapter(request.model),
            )
            for i, prompt in enumerate(prompts)
        )
        return await queue_all(self.engine_client, requests)


class _Answer:
    """Makes the answer to one request: its fixed fields, choices and usage."""

    def __init__(self, request: CompletionRequest, args: ServerArgs, answer_id: str, model: str) -> None:
        self._id, self._created, self._model = answer_id, int(time.time()), model
        self._ping_seconds, self._tells_cached = args.sse_ping_interval, args.enable_prompt_tokens_details
        self._ends_in_usage, self._has_usage = request.tells_usage(forced=args.enable_force_include_usage)
        self._frames: dict[int, TextFrame] = {}

    def whole(self, shown: list[CompletionResponseChoice], choices: Sequence[PromptChoices]) -> CompletionResponse:
        """Return the whole answer."""
        usage = self._usage(choices)
        return CompletionResponse(id=self._id, created=self._created, model=self._model, choices=shown, usage=usage)

    async def frames(
        self, outputs: Sequence[EngineOutputs], choices: Sequence[PromptChoices]
    ) -> AsyncGenerator[bytes, None]:
        """Yield the frames of all prompts' outputs as they come, and at the end the usage if requested."""
        async for ping in outputs[0].pings(self._ping_seconds):
            yield ping
        if len(outputs) == 1:
            if choices[0].is_plain and not self._has_usage:
                outputs[0].relay(self._frame(0).event)
            async for output in outputs[0]:
                choices[0].num_tokens += outputs[0].take_relayed()
                frames = self._pieces(output, choices[0], choices)
                if frames := frames + (self._end(choices) if output.finished else b""):
                    yield frames
            return
        async with contextlib.aclosing(merge(outputs)) as merged:
            async for prompt, output in merged:
                if frames := self._pieces(output, choices[prompt], choices):
                    yield frames
        if end := self._end(choices):
            yield end

    def _end(self, choices: Sequence[PromptChoices]) -> bytes:
        """Return the frame of the usage, if one is requested at the end."""
        return event(self._chunk([], self._usage(choices))) if self._ends_in_usage else b""

    def _pieces(self, output: RequestOutput, prompt_choices: PromptChoices, choices: Sequence[PromptChoices]) -> bytes:
        if not self._has_usage and prompt_choices.is_plain and all(map(prompt_choices.has_begun, output.outputs)):
            texts = map(prompt_choices.take_plain, output.outputs)
            return b"".join([self._frame(index).event(text) for index, text in texts if text])
        shown = prompt_choices.of(output)
        usage = self._usage(choices) if self._has_usage else None
        return b"".join([event(self._chunk([each], usage)) for each in shown])

    def _frame(self, index: int) -> TextFrame:
        frame = self._frames.get(index)
        if frame is None:
            frame = self._frames[index] = TextFrame.of(
                lambda text: self._chunk([CompletionResponseChoice(index=index, text=text)])
            )
        return frame

    def _chunk(self, choices: list[CompletionResponseChoice], usage: UsageInfo | None = None) -> Any:
        chunk = CompletionStreamResponse(id=self._id, created=self._created, model=self._model, choices=choices)
        if usage is None:
            return chunk
        return CompletionStreamResponse(
            id=self._id, created=self._created, model=self._model, choices=choices, usage=usage
        )

    def _usage(self, choices: Sequence[PromptChoices]) -> UsageInfo:
        details = PromptTokensDetails.sum(each.prompt_details for each in choices) if self._tells_cached else None
        return make_usage(
            sum(each.num_prompt_tokens for each in choices),
            sum(each.num_tokens for each in choices),
            details,
        )
