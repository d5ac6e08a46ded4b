"""Decisions on an asynchronous engine: all rows of a decision run among other requests, and one reader takes them."""

from __future__ import annotations

import asyncio
import contextlib
import copy
from collections.abc import Awaitable, Callable, Mapping
from itertools import count
from typing import Any

from jaxllm.decisions import DecisionOutput
from jaxllm.engine.client.replicated_core import for_replica
from jaxllm.engine.decisions.decider import Decision, DecisionOptions
from jaxllm.engine.front.front_end import FrontEnd
from jaxllm.engine.front.input_processor import ProcessedRequest
from jaxllm.engine.online.admission import Reservation
from jaxllm.engine.online.async_core import AsyncCore
from jaxllm.engine.online.gate import Flag
from jaxllm.engine.online.prompt_encoding import in_media_thread
from jaxllm.engine.online.running_requests import RunningRequests
from jaxllm.exceptions import EngineGenerateError
from jaxllm.outputs import AnyOutput, RequestOutput

_ROWS_AT_ONCE = 64
"""The rows that are queued before other tasks have their turn."""


class _Reader:
    """Takes the rows of a decision until it has all, or one has failed."""

    def __init__(self, decision: Decision, num_rows: int, reservation: Reservation) -> None:
        self._decision, self._num_left, self._reservation = decision, num_rows, reservation
        self._error: Exception | None = None
        self._has_ended = Flag()
        self._has_ended.clear()

    async def wait(self) -> None:
        """Wait for all rows. Raises the error that has ended one of them."""
        await self._has_ended.wait()
        if self._error is not None:
            raise copy.copy(self._error)

    def put(self, output: AnyOutput | Exception) -> None:
        """Take in a row, or the error that has ended it."""
        if self._error is not None:
            return
        self._reservation.release_prompt()
        try:
            if isinstance(output, Exception):
                raise output
            assert isinstance(output, RequestOutput)
            self._decision.take(output)
        except Exception as error:  # noqa: BLE001 - it ends this decision alone
            self._error = error
        self._num_left -= 1
        if not self._num_left or self._error is not None:
            self._has_ended.set()

    def end(self) -> None:
        """End the decision without an answer."""
        self.put(EngineGenerateError("The decision was aborted."))

    def admit(self) -> None:
        """Do nothing: rows have no grammars."""


async def decide(
    front: FrontEnd,
    requests: RunningRequests,
    enter: Callable[[], Awaitable[object]],
    core: Callable[[], AsyncCore],
    request_id: str,
    state: Any,
    questions: Any,
    options: DecisionOptions,
    lora_request: Any = None,
    trace_headers: Mapping[str, str] | None = None,
    priority: int = 0,
    data_parallel_rank: int | None = None,
) -> DecisionOutput:
    """Ask the questions, after `enter`, and return their answers; each row counts as a request.

    Raises VLLMValidationError for what cannot be asked, EngineGenerateError if a row has failed or the decision is
    aborted. It leaves nothing behind when it fails or the caller is cancelled.
    """
    inputs = front.inputs
    adapter, trace = inputs.check_adapter(lora_request), inputs.check_trace(trace_headers)

    def prepare() -> tuple[Decision, list[ProcessedRequest]]:
        decision, numbers = Decision(front, state, questions, options), count()
        return decision, decision.requests(lambda: f"{request_id}-{next(numbers)}", priority, adapter, trace)

    with contextlib.ExitStack() as stack:
        stack.callback(requests.reserve(1).release)  # under overload a refusal has to be cheap
        decision, rows = await (in_media_thread if options.template.images else asyncio.to_thread)(prepare)
        reservation = requests.reserve(len(rows) - 1)
        stack.callback(reservation.release)
        reservation.hold_prompt(decision.num_new_tokens)
        await enter()
        reader = _Reader(decision, len(rows), reservation)
        queued: list[str] = []
        with requests.hold(request_id, reader):
            try:
                for row in rows:
                    requests.add(row, reader, None)
                    queued.append(row.request_id)
                    core().remote.add_request(for_replica(row.core, core().remote, data_parallel_rank))
                    if len(queued) % _ROWS_AT_ONCE == 0:
                        await asyncio.sleep(0)
                await reader.wait()
            finally:
                for row_id in queued:
                    core().abort_requests(requests.abort(row_id))
    return decision.answer()
