"""A remote core on an event loop: read its messages as they come, one a turn, and notice its end."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import logging
import threading
import weakref
from collections.abc import Callable, Collection, Coroutine, Iterable
from concurrent.futures import wait
from typing import Any

from jaxllm.core_messages import EngineCoreOutputs
from jaxllm.engine.client.remote_client import RemoteClient, result
from jaxllm.engine.online.request_stream import TextOutbox
from jaxllm.engine.transport.wire import FrameError
from jaxllm.exceptions import EngineDeadError, EngineGenerateError
from jaxllm.utils.fork_safety import Home, engines_home

logger = logging.getLogger(__name__)

_WATCH_SECONDS = 0.5
_END_POLL_SECONDS = 0.2
_MOST_STEPS = 4
"""The number of steps of text that are taken in before anything else has its turn."""


class AsyncCore:
    """Joins a core to the event loop that first uses it."""

    def __init__(
        self,
        remote: RemoteClient,
        on_outputs: Callable[[EngineCoreOutputs], Collection[str]],
        on_end: Callable[[Exception, bool], Collection[str]],
        outbox: TextOutbox | None = None,
    ) -> None:
        """Give each step's outcome to `on_outputs`. Give to `on_end` the error that has ended all requests, and whether
        it has ended the core. Both return the sequences that the core must stop. `outbox` has the text that steps bring
        without a reader's task.

        The event loop holds this object and the two functions, so they must not hold an engine that may be dropped.
        """
        self.remote = remote
        self._on_outputs, self._on_end = on_outputs, on_end
        self._outbox = outbox or TextOutbox()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._watching: asyncio.TimerHandle | None = None
        self._reading: asyncio.Handle | None = None
        """The next turn's reading, while there are messages."""
        self._finalizer = weakref.finalize(self, _drop, engines_home(), remote)

    @property
    def dead_error(self) -> EngineDeadError | None:
        """Return the error that ended the core; None while it runs."""
        return self.remote.dead_error

    @property
    def loop(self) -> asyncio.AbstractEventLoop | None:
        """Return the event loop that this listens on."""
        return self._loop

    def attach(self) -> None:
        """Listen on the running event loop. Raises RuntimeError on a second one, unless the first is closed.

        What a closed loop has left is ended. Raises EngineDeadError once the core has ended.
        """
        loop = asyncio.get_running_loop()
        if self._loop is loop:
            return
        self.remote.raise_if_dead()
        if self._loop is not None and not self._loop.is_closed():
            raise RuntimeError(
                "This AsyncLLM belongs to another event loop: make all calls on the one that used it first."
            )
        if self._loop is not None:
            self._leave()
        self._loop = loop
        for fd in self.remote.fds:
            loop.add_reader(fd, self._on_readable)
        self._watching = loop.call_later(_WATCH_SECONDS, self._watch)
        self._on_readable()

    def detach(self) -> None:
        """Stop listening."""
        for handle in (self._watching, self._reading):
            if handle is not None:
                handle.cancel()
        self._reading = None
        if self._loop is not None and not self._loop.is_closed():
            for fd in self.remote.fds:
                self._loop.remove_reader(fd)
        self._loop = None

    async def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the core and return its value. Raises what it raises."""
        self.attach()
        call_id = self.remote.begin_call(method, *arguments)
        self._calls[call_id] = asyncio.get_running_loop().create_future()
        try:
            return await self._calls[call_id]
        finally:
            self._calls.pop(call_id, None)
            self.remote.drop_reply(call_id)

    def abort_requests(self, sequence_ids: Collection[str]) -> None:
        """End sequences; a core that has ended has ended them."""
        if sequence_ids:
            with contextlib.suppress(EngineDeadError):  # the next caller gets it, and all requests end
                self.remote.abort_requests(sequence_ids)

    def release(self, sequence_ids: Iterable[str]) -> None:
        """Give up the blocks that ended sequences have kept for forks, if the core has not ended."""
        with contextlib.suppress(EngineDeadError):
            self.remote.release(sequence_ids)

    def look(self) -> None:
        """Take in what has come, and see whether the core has ended or hangs.

        While messages are being read one by one it does nothing: to read them all at once would hold up the loop.
        """
        if self._reading is not None:
            return
        ended: EngineDeadError | None = None
        try:
            self.remote.look()
        except EngineDeadError as error:
            ended = error
        while self._take():
            pass
        self._outbox.flush()
        if ended is not None:
            self._end(ended)

    def shutdown(self, timeout: float | None = None) -> None:
        """End the core; requests that run end with EngineDeadError. May be called twice."""
        if self.remote.is_closed:
            return
        self._begin_shutdown()
        self.remote.finish_shutdown(timeout)

    async def close(self, timeout: float | None = None, *, error: EngineDeadError | None = None) -> None:
        """End the core as `shutdown` does, while the event loop goes on; what waits for it ends with `error`."""
        if self.remote.is_closed:
            return
        self._begin_shutdown(error)
        await asyncio.to_thread(self.remote.finish_shutdown, timeout)

    def drop(self) -> None:
        """End the core of an engine that nobody holds any more, from any thread, and hold up no event loop for it."""
        loop = self._loop
        if loop is None or not loop.is_running() or loop is asyncio._get_running_loop():
            self._drop()
        else:
            with contextlib.suppress(RuntimeError):  # the loop has been closed, and holds this no more
                loop.call_soon_threadsafe(self._drop)

    def _drop(self) -> None:
        if self.remote.is_closed:
            return
        self._begin_shutdown()
        try:
            threading.Thread(target=self.remote.finish_shutdown, name="jaxllm-core-end", daemon=True).start()
        except RuntimeError:  # Python exits, and starts no more threads
            self.remote.finish_shutdown()

    def _begin_shutdown(self, error: EngineDeadError | None = None) -> None:
        self.detach()
        self.remote.begin_shutdown()
        assert self.remote.dead_error is not None
        self._end(error or self.remote.dead_error)

    def _leave(self) -> None:
        """End what a closed loop has left: its tasks never go on."""
        for call_id in self._calls:
            self.remote.drop_reply(call_id)
        self._calls.clear()
        self._reading = None
        self._fail_all(EngineGenerateError("The event loop of the request was closed before its end."))

    def _watch(self) -> None:
        assert self._loop is not None
        self._watching = self._loop.call_later(_WATCH_SECONDS, self._watch)
        self.look()

    def _on_readable(self) -> None:
        if self._reading is None:
            self._read()

    def _read(self) -> None:
        """Take in one message, or a few that bring nothing but text, and schedule the next call while there are more:
        the socket signals new ones only.
        """
        self._outbox.holds = self._reading is not None  # a step has come just before: this front end is behind
        self._reading = None
        try:
            for _ in range(_MOST_STEPS):
                is_more = self.remote.receive()
                self._take()
                if not (is_more and self._outbox.has_text_alone):
                    break
        except EngineDeadError:
            self.look()
            return
        finally:
            self._outbox.flush()
        if is_more and self._loop is not None:  # pyright: ignore[reportPossiblyUnboundVariable]
            self._reading = self._loop.call_soon(self._read)
        elif self.remote.has_ended:
            self.look()

    def _take(self) -> bool:
        """Hand on what was received; return False if there was nothing.

        An error in this ends all requests: it is unknown which outputs are lost, and readers would wait for ever.
        """
        outputs = None
        try:
            outputs = self.remote.take_outputs()
            if outputs is not None:
                self.abort_requests(self._on_outputs(outputs))
        except FrameError as error:
            message = f"An outcome of the engine core cannot be read, and nobody knows whose it was: {error}"
            self._fail_all(EngineGenerateError(message))
            return True
        except Exception as error:
            logger.exception("the outcome of a step cannot be handed on")
            self._fail_all(EngineGenerateError(f"The outcome of a step is lost: {type(error).__name__}: {error}"))
        for call_id, future in list(self._calls.items()):
            reply = self.remote.take_reply(call_id)
            if reply is not None and not future.done():
                try:
                    future.set_result(result(reply))
                except Exception as error:  # noqa: BLE001 - the caller's
                    future.set_exception(error)
        return outputs is not None

    def _end(self, error: EngineDeadError) -> None:
        self.detach()
        self._fail_all(error)
        for future in self._calls.values():
            if not future.done() and not future.get_loop().is_closed():
                future.set_exception(copy.copy(error))

    def _fail_all(self, error: Exception) -> None:
        """End all requests; their readers get the error."""
        self.abort_requests(self._on_end(error, self.remote.dead_error is not None))


def _drop(home: Any, remote: RemoteClient) -> None:
    """End the core of an engine that nobody holds any more, except in a forked child."""
    if home.is_here:
        remote.drop()


def drop_core(home: Home, core: AsyncCore) -> None:
    """End the core of an engine that nobody holds any more, except in a forked child."""
    if home.is_here:
        core.drop()


def end_from_thread(loop: asyncio.AbstractEventLoop | None, close: Callable[[], Coroutine[Any, Any, None]]) -> bool:
    """Run `close()` on an event loop of another thread and wait for its end; return False if none runs there."""
    if loop is None or loop is asyncio._get_running_loop():
        return False
    if not loop.is_running():
        return False
    closing = asyncio.run_coroutine_threadsafe(close(), loop)
    while loop.is_running() and not wait([closing], _END_POLL_SECONDS).done:
        pass
    if not closing.done() or closing.cancelled():  # the loop has ended first
        return False
    closing.result()
    return True
