"""The outputs of one request on their way to the task that reads them; a slow reader gets them merged."""

from __future__ import annotations

import asyncio
import copy
import logging
from collections.abc import Callable
from typing import Protocol

from jaxllm.engine.online.gate import wake
from jaxllm.outputs import AnyOutput, RequestOutput
from jaxllm.sampling_params import RequestOutputKind

logger = logging.getLogger(__name__)


class TextRelay(Protocol):
    """What a reader does with plain text, without the reader's task: it writes a frame to a connection."""

    is_open: bool
    """Whether more may be written; False while the client is slow, and once it has left."""

    outbox: TextOutbox
    """While it holds text, the relay keeps what it takes, and puts itself into it."""

    def write(self, text: str, num_tokens: int) -> None:
        """Take the text of new tokens, often ""."""
        ...

    def flush(self) -> None:
        """Write what was kept."""
        ...


class TextOutbox:
    """Holds text to the end of a turn of the event loop. Steps that wait, and bring nothing but text, may share a turn,
    and then each connection gets the texts of all in one write: half of a token's time is the system's.
    """

    __slots__ = ("holds", "is_read", "relays")

    def __init__(self) -> None:
        self.holds = False
        """True while more steps may wait; otherwise text is written at once, which brings it sooner."""
        self.relays: list[TextRelay] = []
        """The relays that have kept text."""
        self.is_read = False
        """True once a task has something to read, for which it needs the next turn."""

    @property
    def has_text_alone(self) -> bool:
        """Return whether this turn has brought text to hold, and nothing else."""
        return bool(self.relays) and not self.is_read

    def flush(self) -> None:
        """Write all texts, at the end of a turn."""
        relays, self.relays, self.is_read = self.relays, [], False
        for relay in relays:
            try:
                relay.flush()
            except Exception:  # the connection's: it ends this answer alone, once that is noticed
                logger.exception("the text of an answer cannot be written")


class RequestOutputCollector:
    """Holds at most one output, so that its memory is bounded however slow the reader is: what comes meanwhile is
    merged into it. For one event loop and one reader.

    A reader that calls `relay_to` needs no wake-up for plain text: while it waits, and so has handed on all before,
    text goes to the relay. What the relay cannot take, and all that is not plain text, it reads itself.
    """

    __slots__ = ("_aggregates", "_error", "_is_admitted", "_outbox", "_output", "_waiter", "relay", "request_id")

    def __init__(self, output_kind: RequestOutputKind, request_id: str, outbox: TextOutbox | None = None) -> None:
        self.request_id = request_id
        self._outbox = outbox or TextOutbox()
        self._aggregates = output_kind is RequestOutputKind.DELTA
        self._output: AnyOutput | None = None
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._is_admitted = False
        self.relay: TextRelay | None = None

    def relay_to(self, relay: TextRelay) -> None:
        """Give plain text to a relay from now on."""
        relay.outbox = self._outbox
        self.relay = relay

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
