"""Run the inputs of a pooling request: each is an engine request, and all end together."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Sequence
from typing import Any

from jaxllm.engine.front.text_forms import as_form
from jaxllm.engine.online.async_llm import AsyncLLM
from jaxllm.exceptions import VLLMValidationError
from jaxllm.outputs import PoolingRequestOutput
from jaxllm.pooling_params import PoolingParams
from jaxllm.resolve.pooling_settings import PoolingSettings, TextForm
from jaxllm.server.http.caller import Caller
from jaxllm.server.openai.chat_protocol import ChatCompletionRequest
from jaxllm.server.openai.serving_chat import OpenAIServingChat
from jaxllm.server.openai.usage import PromptTokensDetails, UsageInfo, make_usage
from jaxllm.server.pooling.pooling_protocol import InputFields, PooledFields
from jaxllm.text.prompts import ParsedPrompt, begin_with
from jaxllm.utils.async_utils import threaded_if_long

MAX_NUMBERS = 2**24
"""The maximum number of numbers in a request's outputs. As JSON each takes 20 bytes, all in memory at once."""


class PooledRequests:
    """Makes prompts from inputs and runs them."""

    def __init__(self, chat: OpenAIServingChat, settings: PoolingSettings, *, trusts_template: bool) -> None:
        """Render conversations as `chat` does, and run everything on its engine."""
        self.engine_client: AsyncLLM = chat.engine_client
        self.models, self.settings = chat.models, settings
        self._chat, self._trusts_template = chat, trusts_template

    async def run_inputs(
        self,
        request: InputFields,
        params: PoolingParams,
        caller: Caller,
        form: TextForm | None = None,
        **options: Any,
    ) -> list[PoolingRequestOutput[Any]]:
        """Run all inputs of a request, texts in a form if one is given; return their outputs in order.

        `options` are those of `run`, and it raises what that does.
        """
        inputs = request.inputs()
        request.check_template(inputs)
        with request.fields_named(request.source):
            prompts = [await self._prompt(each) for each in inputs]
            if form is not None:
                front, work = self.engine_client.front, sum(len(each) for each in inputs if isinstance(each, str))
                prompts = await threaded_if_long(work, lambda: [as_form(front, form, each) for each in prompts])
        return await self.run(request, prompts, params, caller, [request.source] * len(prompts), **options)

    async def run(
        self,
        request: PooledFields,
        prompts: Sequence[Any],
        params: PoolingParams,
        caller: Caller,
        sources: Sequence[str],
        before: str | None = None,
        prompt_name: str | None = None,
    ) -> list[PoolingRequestOutput[Any]]:
        """Run prompts, under the request's id and a number; return their outputs in order.

        Texts to embed begin with `before`, or else with the checkpoint's named or default prompt, and have the adapter
        that comes with that prompt; it and one that the request names as its model are refused together.
        If one fails, or the caller is cancelled, all are aborted. Raises exceptions that `error_response` handles;
        an error about a prompt names its entry in `sources`.
        """
        self.engine_client.admission.check_room(len(prompts))
        adapter = self.models.adapter(request.model)
        if before is None and params.task == "embed":
            before = self.settings.prompt(prompt_name)
            adapter = self.settings.adapter(prompt_name, adapter, "model")
        options, size = request.tokenization_kwargs(), _Size()
        readers: list[asyncio.Task[PoolingRequestOutput[Any]]] = []
        try:
            async with asyncio.TaskGroup() as group:
                for i, prompt in enumerate(prompts):
                    outputs = self.engine_client.encode(
                        _salted(begin_with(before or "", prompt), request.cache_salt),
                        params,
                        f"{caller.request_id}-{i}",
                        adapter,
                        trace_headers=caller.trace_headers,
                        priority=request.priority,
                        tokenization_kwargs=options,
                        data_parallel_rank=caller.data_parallel_rank,
                    )
                    readers.append(group.create_task(_read(outputs, request, sources[i], size)))
                    await asyncio.sleep(0)  # let other requests run after each prompt is tokenized
        except BaseExceptionGroup as error:
            raise error.exceptions[0] from None
        return [reader.result() for reader in readers]

    async def _prompt(self, value: str | list[int] | ChatCompletionRequest) -> Any:
        if isinstance(value, str):
            return {"prompt": value}
        if isinstance(value, list):
            return {"prompt_token_ids": value}
        value.check(trusts_template=self._trusts_template)
        if not self._chat.has_template(value):
            message = "messages need a chat template, and the model has none: give texts as input."
            raise VLLMValidationError(message, parameter="messages")
        return await self._chat.render(value)


class _Size:
    """Counts the numbers of a request's outputs as they come."""

    def __init__(self) -> None:
        self._total = 0

    def add(self, count: int, source: str) -> None:
        """Raise VLLMValidationError, naming the field `source`, if there are too many."""
        self._total += count
        if self._total > MAX_NUMBERS:
            message = (
                f"{source}: the outputs have more than {MAX_NUMBERS} numbers. Send fewer or shorter texts at once."
            )
            raise VLLMValidationError(message, parameter=source)


async def _read(outputs: Any, request: PooledFields, source: str, size: _Size) -> PoolingRequestOutput[Any]:
    with request.fields_named(source):
        async with contextlib.aclosing(outputs):
            output = await anext(outputs)
    size.add(output.outputs.data.size, source)
    return output


def _salted(prompt: Any, salt: str | None) -> Any:
    if salt is None:
        return prompt
    if isinstance(prompt, ParsedPrompt):
        return dataclasses.replace(prompt, salt=salt)
    return {**prompt, "cache_salt": salt}


def usage_of(outputs: Sequence[PoolingRequestOutput[Any]], *, tells_cached: bool) -> UsageInfo:
    """Return the tokens of all prompts."""
    details = PromptTokensDetails.sum(map(PromptTokensDetails.of, outputs)) if tells_cached else None
    return make_usage(sum(len(each.prompt_token_ids) for each in outputs), 0, details)
