"""Serve `/pooling`: the raw outputs of any of the model's tasks."""

from __future__ import annotations

from jaxllm.engine.front.text_forms import counted, find_form
from jaxllm.exceptions import VLLMValidationError
from jaxllm.server.http.caller import Caller
from jaxllm.server.pooling.pooling_protocol import PoolingRequest, PoolingResponse, PoolingResponseData
from jaxllm.server.pooling.requests import PooledRequests, usage_of
from jaxllm.server.pooling.vectors import VectorBytes, encoder
from jaxllm.utils.async_utils import threaded_if_long

_REMOVED = {"score": "`classify`", "encode": "`token_embed` or `token_classify`"}
"""Tasks removed from vLLM, and their replacements."""


class ServingPooling:
    """Answers requests for a task."""

    def __init__(self, pooled: PooledRequests, *, tells_cached: bool) -> None:
        self._pooled, self._tells_cached = pooled, tells_cached

    async def answer(self, request: PoolingRequest, caller: Caller) -> PoolingResponse | VectorBytes:
        """Answer a request. Raises exceptions that `error_response` handles."""
        self._pooled.models.check(request.model)
        task, encode = self._task(request.task), encoder(request)
        form = find_form(self._pooled.settings, task, request.prompt_name)
        outputs = await self._pooled.run_inputs(request, request.params(task), caller, form)
        arrays = [counted(each, form).outputs.data for each in outputs]
        answer_id, model = caller.shown_id("pooling", request.request_id), self._pooled.models.shown(request.model)
        usage, size = usage_of(outputs, tells_cached=self._tells_cached), sum(each.size for each in arrays)
        if request.is_in_bytes:
            return await threaded_if_long(size, VectorBytes.of, request, arrays, answer_id, model, usage)
        data = await threaded_if_long(
            size, lambda: [PoolingResponseData(index=i, data=encode(each)) for i, each in enumerate(arrays)]
        )
        return PoolingResponse(id=answer_id, model=model, data=data, usage=usage)

    def _task(self, task: str | None) -> str:
        tasks = self._pooled.settings.tasks
        if task is None:
            return tasks[0]
        if task not in tasks:
            message = f"Unsupported task: {task[:100]!r} Supported tasks: {tasks}"
            if task in _REMOVED:
                message = f"`{task}` task was removed; use {_REMOVED[task]} instead."
            raise VLLMValidationError(message, parameter="task", value=task)
        return task
