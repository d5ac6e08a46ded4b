"""The outputs of one request on their way to the task that reads them; a slow reader gets them merged."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable
from typing import Protocol

from jaxllm.engine.online.gate import wake
from jaxllm.outputs import AnyOutput, RequestOutput
from jaxllm.sampling_params import RequestOutputKind


class TextRelay(Protocol):
    """What a reader does with plain text, without the reader's task: it writes a frame to a connection."""

    is_open: bool
    """Whether more may be written; False while the client is slow, and once it has left."""

    def write(self, text: str, num_tokens: int) -> None:
        """Write the text of new tokens, often ""."""
        ...


class RequestOutputCollector:
    """Holds at most one output, so that its memory is bounded however slow the reader is: what comes meanwhile is
    merged into it. For one event loop and one reader.

    A reader that sets `relay` needs no wake-up for plain text: while it waits, and so has handed on all before, text
    goes to the relay. What the relay cannot take, and all that is not plain text, it reads itself.
    """

    __slots__ = ("_aggregates", "_error", "_is_admitted", "_output", "_waiter", "relay", "request_id")

    def __init__(self, output_kind: RequestOutputKind, request_id: str) -> None:
        self.request_id = request_id
        self._aggregates = output_kind is RequestOutputKind.DELTA
        self._output: AnyOutput | None = None
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._is_admitted = False
        self.relay: TextRelay | None = None

    def text_writer(self) -> Callable[[str, int], None] | None:
        """Return the relay's `write`, if the reader waits and the relay is open."""
        relay = self.relay
        return None if relay is None or self._waiter is None or not relay.is_open else relay.write

    def put(self, output: AnyOutput | Exception) -> None:
        """Take in an output; a delta is appended to one that has not been read, another kind replaces it. An error,
        which ends the request, is raised to the reader after what has not been read.
        """
        if isinstance(output, Exception):
            self._error = output
        else:
            self._is_admitted = True
            before = self._output
            if before is None or not isinstance(output, RequestOutput):  # a pooled output comes whole
                self._output = output
            elif isinstance(before, RequestOutput):
                before.add(output, aggregate=self._aggregates)
        self._wake()

    def admit(self) -> None:
        """Let `wait_admitted` return: the core has found the request good."""
        self._is_admitted = True
        self._wake()

    async def wait_admitted(self) -> None:
        """Wait until the core has found the request good, or has refused it, which raises."""
        while not self._is_admitted:
            if self._error is not None:
                raise copy.copy(self._error)
            await self._wait_news()

    async def get(self) -> AnyOutput:
        """Return the output that has not been read, waiting for one. Raises what has ended the request."""
        while (output := self.get_nowait()) is None:
            await self._wait_news()
        return output

    def get_nowait(self) -> AnyOutput | None:
        """Return the output that has not been read; None if there is none. Raises what has ended the request."""
        output, self._output = self._output, None
        if output is None and self._error is not None:
            raise copy.copy(self._error)  # others may get it too, and each would add to its traceback
        return output

    async def _wait_news(self) -> None:
        """Wait until something has come."""
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None:
            wake(waiter)
