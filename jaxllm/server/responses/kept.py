"""Keep the responses of a server: those that have ended, and those that run in the background."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import NamedTuple

import msgspec

from jaxllm.exceptions import VLLMValidationError
from jaxllm.server.http.sse import EventStream
from jaxllm.server.responses.answer import ResponseAnswer
from jaxllm.server.responses.event_log import EventLog, LogRoom
from jaxllm.server.responses.items import ItemList, Page, list_items
from jaxllm.server.responses.objects import DeletedResponse, Response
from jaxllm.server.responses.request import ResponsesRequest
from jaxllm.server.responses.store import ResponseStore, size_of
from jaxllm.utils.async_utils import threaded_if_long

_UNSTORED = "responses are stored only by a server with one front end (api_server_count=1)."


class _Background(NamedTuple):
    """A running response."""

    answer: ResponseAnswer
    task: asyncio.Task[None]
    log: EventLog
    """Its events."""
    input: tuple[bytes, ...]
    """The items that it answers, as lists in JSON."""


class KeptResponses:
    """The stored responses of all models of a server, and those that run in the background."""

    def __init__(self, ping_interval: float = 0.0) -> None:
        """Keep nothing yet. Streams of responses have a comment after `ping_interval` seconds without an event."""
        self.store, self.room = ResponseStore(), LogRoom()
        self._background: dict[str, _Background] = {}
        """By id; the engines limit their number."""
        self._ping_interval = ping_interval
        self.stores = True
        """Whether responses are stored."""

    def stop_storing(self) -> None:
        """Store nothing: another front end of the engine may get the next request of a conversation."""
        self.stores = False

    def retrieve(self, response_id: str) -> bytes:
        """Return a response in JSON. Raises RequestFailedError, 404, for one that is not stored."""
        self._check_stores()
        running = self._background.get(response_id)
        if running is not None:
            return msgspec.json.encode(running.answer.response())
        return self.store.find(response_id, "response_id").body

    def follow(self, response_id: str, number: int) -> EventStream:
        """Return the events of a response from a sequence number on, those to come too.

        Raises RequestFailedError, 404, for one that is not stored, and VLLMValidationError for one that was not made in
        the background, or events that are not kept any more.
        """
        self._check_stores()
        running = self._background.get(response_id)
        log = running.log if running is not None else self.store.find(response_id, "response_id").log
        if log is None:
            message = "stream: only a response that was created with background=true can be streamed."
            raise VLLMValidationError(message, parameter="stream")
        log.check_kept(number)
        return self.stream_of(log, number)

    async def input_items(self, response_id: str, page: Page) -> ItemList:
        """Return a page of the items that a response answers, those of earlier responses included.

        Raises RequestFailedError, 404, for one that is not stored, and VLLMValidationError for a bad page.
        """
        self._check_stores()
        running = self._background.get(response_id)
        kept = None if running is not None else self.store.find(response_id, "response_id")
        turns = running.input if running is not None else kept.turns if kept is not None else ()
        num_output = 0 if kept is None else len(kept.item_ids)
        return await threaded_if_long(size_of(turns), list_items, turns, num_output, response_id, page)

    async def cancel(self, response_id: str) -> bytes:
        """Cancel a background response, and return it; one that has ended is unchanged.

        Raises RequestFailedError, 404, for one that is not stored, and VLLMValidationError for a foreground one.
        """
        self._check_stores()
        running = self._background.get(response_id)
        if running is not None:
            running.task.cancel()
            await asyncio.wait((running.task,))
        kept = self.store.find(response_id, "response_id")
        if not kept.background:
            message = "response_id: only a response in the background can be cancelled."
            raise VLLMValidationError(message, parameter="response_id")
        return kept.body

    async def delete(self, response_id: str) -> DeletedResponse:
        """Delete a response, and end it first if it runs. Raises RequestFailedError, 404, for an unknown one."""
        self._check_stores()
        if response_id in self._background:
            await self.cancel(response_id)
        self.store.find(response_id, "response_id")
        self.store.discard(response_id)
        return DeletedResponse(id=response_id)

    def _check_stores(self) -> None:
        if not self.stores:
            raise VLLMValidationError(_UNSTORED, parameter="response_id")

    def earlier(self, request: ResponsesRequest) -> tuple[bytes, ...]:
        """Return the conversation that a request continues."""
        previous = request.previous_response_id
        if previous is None:
            return ()
        if previous in self._background:
            message = "previous_response_id: that response is still being made: wait for its end."
            raise VLLMValidationError(message, parameter="previous_response_id", value=previous)
        return self.store.find(previous, "previous_response_id").turns

    def begin(
        self,
        answer: ResponseAnswer,
        log: EventLog,
        asked: tuple[bytes, ...],
        counted: Callable[[], AbstractContextManager[None]],
    ) -> Response:
        """Start a response to the items `asked` in the background, with its events in `log`, and return it; `counted`
        counts it as load.
        """
        response = answer.response()

        async def run() -> None:
            try:
                with counted():
                    await answer.run(log.add)
            finally:
                del self._background[response.id]
                log.end()

        log.add(answer.queue())
        self._background[response.id] = _Background(answer, asyncio.create_task(run()), log, asked)
        return response

    def stream_of(self, log: EventLog, number: int) -> EventStream:
        """Return the stream of a log from a sequence number on. The response goes on when the stream is closed."""
        return EventStream(log.follow(number, self._ping_interval), last=b"")


def check_unstored(request: ResponsesRequest) -> None:
    """Raise VLLMValidationError for a request that needs stored responses."""
    for name in ("store", "background", "previous_response_id"):
        if getattr(request, name):
            raise VLLMValidationError(f"{name}: {_UNSTORED}", parameter=name)
