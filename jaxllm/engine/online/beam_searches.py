"""Asynchronous engines search for the likeliest texts by requests of their own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Mapping
from typing import Any

from jaxllm.engine.front.front_end import FrontEnd
from jaxllm.engine.online.async_core import AsyncCore
from jaxllm.engine.online.running_requests import RunningRequests
from jaxllm.outputs import RequestOutput
from jaxllm.params.checks import INT32_MAX, check_str
from jaxllm.sampling_params import BeamSearchParams


class BeamSearches(ABC):
    """A base of engines that search for the likeliest texts."""

    front: FrontEnd
    _requests: RunningRequests
    _core: AsyncCore

    @abstractmethod
    def _check_open(self) -> None:
        """Raise unless the engine takes requests, be it later."""

    @abstractmethod
    async def _enter(self) -> None:
        """Wait while the engine is paused. Raises if it takes no requests."""

    async def beam_search(
        self,
        prompt: Any,
        request_id: str,
        params: BeamSearchParams,
        lora_request: Any = None,
        *,
        trace_headers: Mapping[str, str] | None = None,
        data_parallel_rank: int | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Search for the likeliest texts and yield them as the outputs of one `RequestOutput`, best first.

        A search that is aborted yields what it has, those that had not ended with finish_reason "abort".
        """
        from jaxllm.engine.online.async_beam_search import search_beams  # which loads numpy

        check_str("request_id", request_id, INT32_MAX)
        self._check_open()
        yield await search_beams(
            self.front,
            self._requests,
            self._enter,
            lambda: self._core,
            request_id,
            prompt,
            params,
            trace_headers,
            lora_request,
            data_parallel_rank,
        )
