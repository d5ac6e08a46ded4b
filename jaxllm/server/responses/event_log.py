"""Keep the events of a background response, for clients that come back."""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import AsyncGenerator, Iterable

from jaxllm.exceptions import VLLMValidationError
from jaxllm.server.http.sse import comment
from jaxllm.server.responses.events import frame
from jaxllm.server.responses.stream import Event, StreamError

_MAX_BYTES, _LONGEST = 256 * 2**20, 32 * 2**20
"""The maximum bytes of all logs of running responses, and of one log."""
_RETRIEVE = "Retrieve the response without stream."
_FRAME_BYTES = 64
"""The approximate bytes of a frame besides its text."""
_PIECE_FRAMES, _PIECE_BYTES = 64, 2**18
"""A follower gets at most this many frames at once, and no more after this many bytes."""


class LogRoom:
    """The room that the logs of running responses share."""

    def __init__(self, max_bytes: int = _MAX_BYTES, longest: int = _LONGEST) -> None:
        """Limit the bytes of all logs, and of one."""
        self._max_bytes, self._longest = max_bytes, longest
        self.num_logs = 0
        """The number of running responses with a log."""

    @property
    def share(self) -> int:
        """Return the bytes that each running response's log may have."""
        return min(self._longest, self._max_bytes // max(1, self.num_logs))


class EventLog:
    """The frames of a response's events. The oldest ones are dropped when it exceeds its share of the room."""

    def __init__(self, room: LogRoom) -> None:
        """Begin a running response's log; `end` ends it."""
        self._room, self._frames, self._first = room, deque[bytes](), 0
        self._change: asyncio.Event | None = None
        """Wakes the followers that wait for more."""
        self.num_bytes, self.is_ended = 0, False
        room.num_logs += 1

    def add(self, events: Iterable[Event]) -> None:
        """Add events, in the order of their sequence numbers, which begin at 0."""
        for event in events:
            self._frames.append(frame(event))
            self.num_bytes += len(self._frames[-1]) + _FRAME_BYTES
        while self.num_bytes > self._room.share and len(self._frames) > 1:
            self.num_bytes -= len(self._frames.popleft()) + _FRAME_BYTES
            self._first += 1
        self._wake()

    def end(self) -> None:
        """End the log: no event follows."""
        if not self.is_ended:
            self.is_ended = True
            self._room.num_logs -= 1
            self._wake()

    def check_kept(self, number: int) -> None:
        """Raise VLLMValidationError if the event with a sequence number was dropped."""
        if number < self._first:
            message = f"starting_after must be at least {self._first - 1}: earlier events are not kept. {_RETRIEVE}"
            raise VLLMValidationError(message, parameter="starting_after", value=number - 1)

    async def follow(self, number: int, ping_seconds: float) -> AsyncGenerator[bytes, None]:
        """Yield the frames from a sequence number on until the end, and a comment after each idle interval (0: none).

        A follower that falls behind the dropped events gets an error event.
        """
        while True:
            if number < self._first:
                message = f"The events up to {self._first - 1} are not kept any more. {_RETRIEVE}"
                yield frame(StreamError(sequence_number=number, code="events_dropped", message=message))
                return
            if piece := self._piece(number - self._first):
                number += len(piece)
                yield b"".join(piece)
            elif self.is_ended:
                return
            elif not await self._changes(ping_seconds):
                yield comment("waiting")

    def _piece(self, start: int) -> list[bytes]:
        """Return the next frames from an index on, none if there are no more yet."""
        piece, size = [], 0
        for data in itertools.islice(self._frames, start, start + _PIECE_FRAMES):
            piece.append(data)
            size += len(data)
            if size > _PIECE_BYTES:
                break
        return piece

    async def _changes(self, seconds: float) -> bool:
        """Wait for more, and return whether it came in time."""
        if self._change is None:
            self._change = asyncio.Event()
        try:
            async with asyncio.timeout(seconds or None):
                await self._change.wait()
        except TimeoutError:
            return False
        return True

    def _wake(self) -> None:
        if self._change is not None:
            self._change.set()
            self._change = None
