"""Asynchronous engines pool prompts: one request, one output."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Mapping
from typing import Any

from jaxllm.engine.front.front_end import FrontEnd
from jaxllm.engine.online.async_core import AsyncCore
from jaxllm.engine.online.request_stream import RequestOutputCollector
from jaxllm.engine.online.running_requests import RunningRequests
from jaxllm.exceptions import EngineGenerateError
from jaxllm.outputs import PoolingOutput, PoolingRequestOutput
from jaxllm.pooling_params import PoolingParams
from jaxllm.sampling_params import SamplingParams


class Encoding(ABC):
    """A base of engines that pool prompts."""

    front: FrontEnd
    _requests: RunningRequests
    _core: AsyncCore

    @abstractmethod
    async def add_request(
        self,
        request_id: str,
        prompt: Any,
        params: SamplingParams | PoolingParams,
        arrival_time: float | None = None,
        lora_request: Any = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        data_parallel_rank: int | None = None,
    ) -> RequestOutputCollector:
        """Queue a request and return its outputs' collector."""

    async def encode(
        self,
        prompt: Any,
        pooling_params: PoolingParams,
        request_id: str,
        lora_request: Any = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        tokenization_kwargs: dict[str, Any] | None = None,
        *,
        data_parallel_rank: int | None = None,
    ) -> AsyncGenerator[PoolingRequestOutput[PoolingOutput], None]:
        """Pool a prompt, for the task that the params name, and yield its output. Texts get no prompt of the
        checkpoint's: `PoolingSettings.prompt` has what goes before them.

        Raises VLLMValidationError for what this model does not do, EngineGenerateError for a request that failed or
        was aborted. Cancelling the task aborts the request.
        """
        stream = await self.add_request(
            request_id,
            prompt,
            pooling_params,
            lora_request=lora_request,
            trace_headers=trace_headers,
            priority=priority,
            tokenization_kwargs=tokenization_kwargs,
            data_parallel_rank=data_parallel_rank,
        )
        try:
            output = await stream.get()
        except BaseException:
            self._core.abort_requests(self._requests.drop(stream))
            raise
        assert isinstance(output, PoolingRequestOutput)
        if output.error is not None:
            raise EngineGenerateError(output.error)
        yield output
