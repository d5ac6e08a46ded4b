"""The requests that an asynchronous engine has in hand, each with its reader and its reservation."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

from jaxllm.core_messages import EngineCoreOutputs
from jaxllm.engine.front.front_end import FrontEnd
from jaxllm.engine.front.growing_request import TextReader
from jaxllm.engine.front.input_processor import ProcessedRequest
from jaxllm.engine.front.output_processor import ProcessedOutputs, id_in_use
from jaxllm.engine.online.admission import Admission, Reservation
from jaxllm.engine.online.gate import Flag, Gate
from jaxllm.engine.online.prompt_encoding import encode_prompt
from jaxllm.engine.online.request_stream import RequestOutputCollector, TextOutbox
from jaxllm.exceptions import VLLMValidationError
from jaxllm.outputs import AnyOutput
from jaxllm.pooling_params import PoolingParams
from jaxllm.sampling_params import SamplingParams

logger = logging.getLogger(__name__)


class _Running:
    """A request that has not ended, with its reader and what it takes of the bounds, if they count it."""

    __slots__ = ("reader", "reservation")

    def __init__(self, reader: _Reader, reservation: Reservation | None) -> None:
        self.reader, self.reservation = reader, reservation


class _Reader(Protocol):
    """The receiver of a request's outputs."""

    def put(self, output: AnyOutput | Exception) -> None:
        """Take in an output, or the error that has ended the request instead."""
        ...

    def admit(self) -> None:
        """Note that the core has found the request good."""
        ...


class _Group(Protocol):
    """Several requests under one id of the user's, such as a beam search."""

    def put(self, output: AnyOutput | Exception) -> None:
        """Take in the error that has ended it."""
        ...

    def end(self) -> None:
        """End its requests, and itself: its user has aborted it."""
        ...


class RunningRequests:
    """Hands outputs to readers and tracks unfinished requests. What ends requests returns the sequences that the core
    must stop. For one event loop, which holds this and so must not hold the engine by it, but for its readers.
    """

    def __init__(self, front: FrontEnd, admission: Admission, gate: Gate) -> None:
        """Wake the tasks that wait at the gate when the core has ended."""
        self._gate = gate
        self._inputs, self._outputs, self._metrics = front.inputs, front.outputs, front.metrics
        self._admission = admission
        front.metrics.rejections = admission.num_rejected
        self._running: dict[str, _Running] = {}
        self._groups: dict[str, _Group] = {}
        self.outbox = TextOutbox()
        """The text that a turn of the event loop has brought."""
        self.idle = Flag()
        """The flag is set while no request is in hand."""

    def ids(self) -> list[str]:
        """Return the users' ids of all requests, first those of groups, whose ends are those of their requests too."""
        return [*self._groups, *self._running]

    async def take(
        self,
        request_id: str,
        prompt: Any,
        params: SamplingParams | PoolingParams,
        tokenization_kwargs: Mapping[str, Any] | None,
        arrival_time: float | None,
        priority: int,
        trace_headers: Mapping[str, str] | None,
        lora_request: Any = None,
        *,
        enter: Callable[[], Awaitable[object]],
    ) -> tuple[ProcessedRequest, RequestOutputCollector]:
        """Check a request, make it complete, and return it with what its reader reads.

        Once its prompt is tokenized it may `enter`: that waits, or raises, for an engine that is shut.
        Raises VLLMValidationError, or EngineBusyError where the bounds leave no room for it.
        """
        resolved = self._inputs.resolve(params)
        self._inputs.check_priority(priority)
        adapter = self._inputs.check_adapter(lora_request)
        pools = isinstance(resolved, PoolingParams)
        reservation = self.reserve(1 if pools else resolved.n)
        try:
            encoded = await encode_prompt(self._inputs, prompt, tokenization_kwargs, pools=pools)
            reservation.hold_prompt(len(encoded.token_ids))
            await enter()
            request = self._inputs.complete(
                request_id,
                encoded,
                resolved,
                arrival_time=arrival_time,
                priority=priority,
                trace_headers=trace_headers,
                adapter=adapter,
            )
            stream = RequestOutputCollector(resolved.output_kind, request_id, self.outbox)
            self.add(request, stream, reservation, stream)
        except BaseException:
            reservation.release()
            raise
        return request, stream

    def reserve(self, num_sequences: int) -> Reservation:
        """Reserve room for a number of sequences. Raises QueueOverflowError."""
        return Reservation(self._admission, num_sequences)

    def add(
        self,
        request: ProcessedRequest,
        reader: _Reader,
        reservation: Reservation | None,
        text_reader: TextReader | None = None,
    ) -> None:
        """Take on a complete request, which gives `reservation` back at its end. Plain text goes straight to
        `text_reader` while it takes any.

        Raises VLLMValidationError if its id is in use.
        """
        self._check_free(request.request_id)
        self._outputs.add_request(request, text_reader)
        self._running[request.request_id] = _Running(reader, reservation)
        self.idle.clear()

    @contextmanager
    def hold(self, request_id: str, group: _Group) -> Iterator[None]:
        """Have a group in hand while a block runs, also between its requests. Raises VLLMValidationError if its id is
        in use.
        """
        self._check_free(request_id)
        self._groups[request_id] = group
        self.idle.clear()
        try:
            yield
        finally:
            if self._groups.get(request_id) is group:  # and not one of the same id, after all were ended
                del self._groups[request_id]
                self._rest()

    def take_outcome(self, step: EngineCoreOutputs) -> list[str]:
        """Hand a step's outputs to their readers."""
        aborts = self._deliver(self._outputs.process_outputs(step))
        self._metrics.on_step(step.engine_index, step.timestamp, step.timestamp)
        return aborts

    def on_end(self, error: Exception, has_core_ended: bool) -> list[str]:
        """End all requests; their readers get the error."""
        aborts = self._fail_all(error)
        if has_core_ended and not self._gate.is_sleeping:
            self._gate.unpaused.set()
        return aborts

    def _deliver(self, processed: ProcessedOutputs) -> list[str]:
        """Hand outputs to their readers."""
        self.outbox.is_read |= bool(processed.outputs or processed.admitted)
        for request_id in processed.admitted:
            self._running[request_id].reader.admit()
        for request_id in processed.started:
            reservation = self._running[request_id].reservation
            if reservation is not None:
                reservation.release_prompt()
        for output in processed.outputs:
            running = self._running[output.request_id]
            refusal = processed.refusals.get(output.request_id)
            refused = refusal and VLLMValidationError(refusal.message, parameter=refusal.parameter)
            running.reader.put(refused or output)
            if output.finished:
                self._forget(output.request_id)
        return processed.aborts

    def abort(self, request_id: str) -> list[str]:
        """End a request, whose reader gets what there is of it with finish_reason "abort"; ignore unknown ids."""
        if request_id in self._groups:
            self._groups[request_id].end()
            return []
        running = self._running.get(request_id)
        if running is None:
            return []
        output, aborted = self._outputs.end_aborted(request_id)
        self._forget(request_id)
        if output is not None:
            running.reader.put(output)
        return aborted

    def drop(self, stream: RequestOutputCollector) -> list[str]:
        """End a request that its reader does not want any more, unless it has ended."""
        running = self._running.get(stream.request_id)
        if running is None or running.reader is not stream:
            return []
        _, aborted = self._outputs.end_aborted(stream.request_id)
        self._forget(stream.request_id)
        return aborted

    def _fail_all(self, error: Exception) -> list[str]:
        for group in self._groups.values():
            group.put(error)
        self._groups.clear()
        self._rest()
        for request_id, running in list(self._running.items()):
            running.reader.put(error)
            self._forget(request_id)
        return self._outputs.fail_all(str(error))

    def _forget(self, request_id: str) -> None:
        reservation = self._running.pop(request_id).reservation
        if reservation is not None:
            reservation.release()
        self._rest()

    def _rest(self) -> None:
        if not self._running and not self._groups:
            self.idle.set()

    def _check_free(self, request_id: str) -> None:
        if request_id in self._running or request_id in self._groups:
            raise id_in_use(request_id)


def log_request(request: ProcessedRequest, most: int | None) -> None:
    """Log a request's id and parameters; at level DEBUG its prompt too, `most` of its characters or token ids."""
    name = request.request_id
    logger.info("request %s: %d prompt tokens, %s", name, len(request.prompt_token_ids), request.params)
    if logger.isEnabledFor(logging.DEBUG):
        prompt = request.prompt_token_ids if request.prompt is None else request.prompt
        shown = prompt[:most]
        logger.debug("request %s: prompt %r%s", name, shown, "..." if len(shown) < len(prompt) else "")
