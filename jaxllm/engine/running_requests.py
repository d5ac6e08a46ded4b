"""The requests that an asynchronous engine has in hand, each with its reader and its place in the queue."""

from __future__ import annotations

import asyncio

from jaxllm.engine.admission import Place
from jaxllm.engine.input_processor import ProcessedRequest
from jaxllm.engine.output_processor import OutputProcessor, ProcessedOutputs
from jaxllm.engine.request_stream import RequestOutputCollector
from jaxllm.exceptions import EngineGenerateError, VLLMValidationError
from jaxllm.messages import RequestError


class _Running:
    """A request that has not ended."""

    __slots__ = ("place", "stream")

    def __init__(self, stream: RequestOutputCollector, place: Place) -> None:
        self.stream, self.place = stream, place


class RunningRequests:
    """This hands outputs to readers and knows who still waits. What ends requests returns the sequences that the core
    must stop. For one event loop.
    """

    def __init__(self, outputs: OutputProcessor) -> None:
        self._outputs = outputs
        self._running: dict[str, _Running] = {}
        self.idle = asyncio.Event()
        """The event is set while no request is in hand."""
        self.idle.set()

    def ids(self) -> list[str]:
        """Return the users' ids of all requests."""
        return list(self._running)

    def add(self, request: ProcessedRequest, place: Place) -> RequestOutputCollector:
        """Take a request in hand and return what its reader reads. Raises VLLMValidationError if its id is in use."""
        self._outputs.add_request(request)
        stream = RequestOutputCollector(request.params.output_kind, request.request_id)
        self._running[request.request_id] = _Running(stream, place)
        self.idle.clear()
        return stream

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
