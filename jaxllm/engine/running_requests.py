"""The requests that an asynchronous engine has in hand, each with its reader and its place in the queue."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

from jaxllm.engine.admission import Admission, Place
from jaxllm.engine.front_end import FrontEnd
from jaxllm.engine.input_processor import EncodedPrompt, ProcessedRequest
from jaxllm.engine.output_processor import ProcessedOutputs
from jaxllm.engine.request_stream import RequestOutputCollector
from jaxllm.exceptions import EngineGenerateError, VLLMValidationError
from jaxllm.messages import RequestError
from jaxllm.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

LONG_TEXT = 2000
"""Texts of more characters are tokenized in a thread: a token takes 2.5 microseconds, and others wait meanwhile."""


class _Running:
    """A request that has not ended."""

    __slots__ = ("place", "stream")

    def __init__(self, stream: RequestOutputCollector, place: Place) -> None:
        self.stream, self.place = stream, place


class RunningRequests:
    """This hands outputs to readers and knows who still waits. What ends requests returns the sequences that the core
    must stop. For one event loop.
    """

    def __init__(self, front: FrontEnd, admission: Admission) -> None:
        self._inputs, self._outputs = front.inputs, front.outputs
        self._admission = admission
        self._running: dict[str, _Running] = {}
        self.idle = asyncio.Event()
        """The event is set while no request is in hand."""
        self.idle.set()

    def ids(self) -> list[str]:
        """Return the users' ids of all requests."""
        return list(self._running)

    async def take(
        self,
        request_id: str,
        prompt: Any,
        params: SamplingParams,
        tokenization_kwargs: Mapping[str, Any] | None,
        *,
        arrival_time: float | None,
        priority: int,
    ) -> tuple[ProcessedRequest, RequestOutputCollector]:
        """Check a request, make it complete, and return it with what its reader reads.

        Raises VLLMValidationError, or EngineBusyError where the bounds leave no room for it.
        """
        resolved = self._inputs.resolve(params)
        place = Place(self._admission, resolved.n)
        try:
            encoded = await self._encode(prompt, tokenization_kwargs)
            place.hold_prompt(len(encoded.token_ids))
            request = self._inputs.complete(request_id, encoded, resolved, arrival_time=arrival_time, priority=priority)
            self._outputs.add_request(request)
        except BaseException:
            place.release()
            raise
        stream = RequestOutputCollector(resolved.output_kind, request_id)
        self._running[request_id] = _Running(stream, place)
        self.idle.clear()
        return request, stream

    async def _encode(self, prompt: Any, options: Mapping[str, Any] | None) -> EncodedPrompt:
        if len(_text(prompt)) > LONG_TEXT:
            return await asyncio.to_thread(self._inputs.encode, prompt, options)
        return self._inputs.encode(prompt, options)

    def deliver(self, processed: ProcessedOutputs) -> list[str]:
        """Hand outputs to their readers."""
        for request_id in processed.admitted:
            self._running[request_id].stream.admit()
        for output in processed.outputs:
            running = self._running[output.request_id]
            running.place.release_prompt()
            refusal = processed.refusals.get(output.request_id)
            if refusal is None:
                running.stream.put(output)
            else:
                running.stream.fail(_error(refusal))
            if output.finished:
                self._forget(output.request_id)
        return processed.aborts

    def abort(self, request_id: str) -> list[str]:
        """End a request, whose reader gets what there is of it with finish_reason "abort"; ignore unknown ids."""
        running = self._running.get(request_id)
        if running is None:
            return []
        output, aborted = self._outputs.end_aborted(request_id)
        self._forget(request_id)
        if output is not None:
            running.stream.put(output)
        return aborted

    def drop(self, stream: RequestOutputCollector) -> list[str]:
        """End a request that its reader does not want any more, unless it has ended."""
        running = self._running.get(stream.request_id)
        if running is None or running.stream is not stream:
            return []
        self._forget(stream.request_id)
        return self._outputs.abort_requests([stream.request_id])

    def fail_all(self, error: Exception) -> list[str]:
        """End all requests; their readers get the error."""
        for request_id, running in list(self._running.items()):
            running.stream.fail(error)
            self._forget(request_id)
        return self._outputs.abort_all()

    def _forget(self, request_id: str) -> None:
        self._running.pop(request_id).place.release()
        if not self._running:
            self.idle.set()


def _error(refusal: RequestError) -> Exception:
    if refusal.kind == "invalid":
        return VLLMValidationError(refusal.message, parameter=refusal.parameter)
    return EngineGenerateError(refusal.message)


def _text(prompt: Any) -> str:
    """Return the text of a prompt, as far as it is one; whether the prompt is well formed is seen later."""
    text = prompt.get("prompt") if isinstance(prompt, Mapping) else getattr(prompt, "text", prompt)
    return text if isinstance(text, str) else ""


def log_request(request: ProcessedRequest) -> None:
    """Log a request's id and parameters; at level DEBUG its prompt too."""
    name = request.request_id
    logger.info("request %s: %d prompt tokens, %s", name, len(request.prompt_token_ids), request.params)
    logger.debug("request %s: prompt %r", name, request.prompt)
