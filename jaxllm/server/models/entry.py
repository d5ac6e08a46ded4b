"""One model of a server: whether it is loaded, the requests that it answers, and those that wait for it."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from enum import StrEnum
from http import HTTPStatus
from typing import Any, Protocol, Self

from jaxllm.engine.online.async_llm import AsyncLLM
from jaxllm.exceptions import EngineBusyError, EngineDeadError, VLLMValidationError

_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 60.0
"""The seconds after a failure before a model is loaded again: they double with each failure in a row."""
_STABLE_SECONDS = 60.0
"""A model that ends before this time after its load has failed, as if it had not been loaded."""


class State(StrEnum):
    """Where a model is. Those of LOADING, READY and LEAVING take room."""

    ABSENT = "absent"
    LOADING = "loading"
    READY = "ready"
    LEAVING = "leaving"
    ASLEEP = "asleep"
    """It was loaded before: what is known of it is kept, with its tokenizer, but its engine has ended."""
    FAILED = "failed"
    """The next request after a pause loads it again."""


class Served(Protocol):
    """What answers the requests of a loaded model, as far as this package sees it."""

    @property
    def engine(self) -> AsyncLLM:
        """Return the engine."""
        ...

    def has(self, name: str) -> bool:
        """Return whether the model, or an adapter of it, has this name."""
        ...


class Loader[R: Served](Protocol):
    """Starts and ends the engine of one model."""

    async def load(self, entry: ModelEntry[R]) -> R:
        """Start the engine, and return what answers its requests. `entry` may have what has answered them before."""
        ...

    async def close(self, record: R) -> None:
        """End the engine, and release its memory."""
        ...

    def stop(self) -> None:
        """End a start that is under way, and every later one: `load` then raises."""
        ...


class ModelUnavailableError(EngineBusyError):
    """A model cannot answer now: it cannot be loaded, or too many requests wait for it."""

    http_status = HTTPStatus.SERVICE_UNAVAILABLE

    def __init__(self, message: str, retry_after: int | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class Room(Protocol):
    """What decides which models are loaded, as far as one of them sees it."""

    def plan(self) -> None:
        """Load what is waited for, and make room for it."""
        ...

    def next_turn(self) -> int:
        """Return the place of a model that a request begins to wait for, behind all others."""
        ...


class ModelEntry[R: Served]:
    """One model of a server. For one event loop."""

    record: R | None = None
    """What answers its requests; None until it has been loaded. It stays while the model sleeps, but for its
    engine's core."""
    state = State.ABSENT
    error: str | None = None
    """Why it could not be loaded, or has ended."""
    num_running = 0
    """The requests that it answers, until the last byte of their answer."""
    last_used = 0.0
    turn = 0
    """Its place in the order of models that requests wait for."""
    is_draining = False
    """True while new requests wait although it is ready, because it is to make room."""
    keep_seconds: float | None = None
    """The time without a request after which it goes to sleep; None is never."""
    load_seconds: float | None = None
    """The time that its last load took."""
    num_loads = num_failures = 0

    def __init__(
        self,
        names: Sequence[str],
        loader: Loader[R] | None,
        *,
        source: str = "",
        sources: Sequence[str] = (),
        adapters: Sequence[str] = (),
        num_bytes: int | None = None,
        num_weight_bytes: int | None = None,
        max_waiting: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Make a model that is not loaded. `names` are those in requests, the first for lists; `adapters` those of the
        adapters that it is loaded with. `num_bytes` is an estimate of its memory, `num_weight_bytes` its files' share,
        None if they are not known; `source` is what it is loaded from, `sources` all that it needs of the hub, as a
        tokenizer or a draft model. At most `max_waiting` requests wait for it.
        """
        self.names, self.adapters, self.source = tuple(names), tuple(adapters), source
        self.sources = tuple(sources)
        self._max_waiting, self._clock = max_waiting, clock
        self.num_bytes = num_bytes
        """The memory that it takes while it is loaded, as far as is known: an estimate, or more if it has taken more;
        None if nothing is known."""
        self._loader, self.num_weight_bytes = loader, num_weight_bytes
        self.created = datetime.now(UTC).replace(microsecond=0)
        self._waiters: deque[asyncio.Future[R]] = deque()
        self._retry_at, self._ready_at, self._num_in_row = -math.inf, -math.inf, 0
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None
        self._room: Room | None = None

    @property
    def name(self) -> str:
        """Return the first of its names."""
        return self.names[0]

    @property
    def engine(self) -> AsyncLLM:
        """Return its engine. It must have been loaded."""
        assert self.record is not None
        return self.record.engine

    @property
    def num_waiting(self) -> int:
        """Return the number of requests that wait for it."""
        return len(self._waiters)

    @property
    def is_loaded(self) -> bool:
        """Return whether it takes room."""
        return self.state in (State.LOADING, State.READY, State.LEAVING)

    @property
    def is_wanted(self) -> bool:
        """Return whether requests wait for it to be loaded."""
        return bool(self._waiters) and self.state not in (State.LOADING, State.READY)

    @property
    def expires_in(self) -> float | None:
        """Return the seconds until it sleeps if no request comes; None if it stays loaded."""
        if self._timer is not None:
            return max(0.0, self._timer.when() - asyncio.get_running_loop().time())
        return self.keep_seconds

    def on_measured(self, num_bytes: int) -> None:
        """Note the memory that it takes now, 0 if that cannot be seen."""
        if num_bytes > (self.num_bytes or 0):
            self.num_bytes = num_bytes

    def join(self, room: Room) -> None:
        """Let `room` decide when it is loaded."""
        self._room = room

    @classmethod
    def pinned(cls, names: Sequence[str], sources: Sequence[str] = ()) -> Self:
        """Return a model that is loaded elsewhere. It is ready once it has what answers, by `pin`, and stays."""
        return cls(names, None, sources=sources)

    def pin(self, record: R) -> None:
        """Be ready with `record`, for good."""
        self.record, self.state = record, State.READY

    def begin(self) -> R | None:
        """Return what answers a request, which counts until `end`; None if the request has to `wait`."""
        if self.state is not State.READY or self.is_draining:
            return None
        self.num_running += 1
        return self.record

    def end(self) -> None:
        """Count a request no more."""
        self.num_running -= 1
        if not self.num_running and self._room is not None:
            self.last_used = self._clock()
            self._room.plan()
            self._watch_idle()

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """Count a request that goes on after its answer. The model must be ready."""
        self.num_running += 1
        try:
            yield
        finally:
            self.end()

    async def wait(self) -> R:
        """Wait until it is loaded, and return what `begin` does.

        Raises ModelUnavailableError if it cannot be loaded, or if too many wait.
        """
        assert self._room is not None
        pause = self._retry_at - self._clock()
        if self.state is State.FAILED and pause > 0:
            raise self._unavailable(math.ceil(pause))
        if len(self._waiters) >= self._max_waiting:
            message = (
                f"{len(self._waiters)} requests wait for the model `{self.name}`, as many as may: try again later."
            )
            raise ModelUnavailableError(message, math.ceil(self.load_seconds or 1.0))
        waiter = asyncio.get_running_loop().create_future()
        if not self._waiters:
            self.turn = self._room.next_turn()
        self._waiters.append(waiter)
        self._room.plan()
        try:
            return await waiter
        except asyncio.CancelledError:
            if waiter in self._waiters:
                self._waiters.remove(waiter)
                self._room.plan()
            elif not waiter.cancelled() and waiter.exception() is None:
                self.end()
            raise

    def admit(self) -> None:
        """Let all that wait go on: it is ready."""
        assert self.record is not None
        waiters, self._waiters = self._waiters, deque()
        for waiter in waiters:
            if not waiter.done():
                self.num_running += 1
                waiter.set_result(self.record)

    def refuse(self, error: Exception) -> None:
        """End the wait of all with an error."""
        waiters, self._waiters = self._waiters, deque()
        for waiter in waiters:
            if not waiter.done():
                waiter.set_exception(error)

    def keep(self, seconds: float | None) -> None:
        """Go to sleep after these seconds without a request; None is never. A pinned model stays."""
        if self._room is not None:
            self.keep_seconds = seconds
            self._watch_idle()

    def load(self) -> None:
        """Begin to load it."""
        self.state, self.error = State.LOADING, None
        self._task = asyncio.get_running_loop().create_task(self._load(self._task))

    def leave(self) -> None:
        """Begin to put it to sleep. No request may run."""
        self.state = State.LEAVING
        self._stop_timer()
        self._task = asyncio.get_running_loop().create_task(self._leave())

    def on_dead(self, error: BaseException) -> None:
        """Note that its engine has ended by itself. The next request loads it again."""
        assert self.record is not None
        assert self._loader is not None
        self._stop_timer()
        was_stable = self._clock() - self._ready_at >= _STABLE_SECONDS
        if was_stable:
            self._num_in_row = 0
        self._fail(error, pauses=not was_stable)
        self._task = asyncio.get_running_loop().create_task(self._loader.close(self.record))

    async def close(self) -> None:
        """End its engine, also one that starts."""
        self._stop_timer()
        self.refuse(EngineBusyError("The server ends: another one may answer this request."))
        if self.state is State.LOADING and self._loader is not None:
            self._loader.stop()
        if self._task is not None:
            await asyncio.wait((self._task,))
        if self.record is not None and self._loader is not None and self.state is State.READY:
            await self._loader.close(self.record)
            self.state = State.ASLEEP

    async def settled(self) -> None:
        """Wait until no change is under way."""
        while self._task is not None and not self._task.done():
            await asyncio.wait((self._task,))

    async def _load(self, before: asyncio.Task[None] | None) -> None:
        """Load it once `before` is done, by which an engine that has died is cleared away."""
        assert self._room is not None
        assert self._loader is not None
        if before is not None:
            await asyncio.wait((before,))
        started = self._clock()
        self.num_loads += 1
        try:
            self.record = await self._loader.load(self)
        except Exception as error:  # noqa: BLE001 - those who wait get it
            self._fail(error, pauses=True)
        else:
            self._ready_at = self.last_used = self._clock()
            self.load_seconds = self._ready_at - started
            self.state = State.READY
            self.admit()
            self._watch_idle()
        self._room.plan()

    async def _leave(self) -> None:
        assert self.record is not None
        assert self._room is not None
        assert self._loader is not None
        try:
            await self._loader.close(self.record)
        finally:
            self.state = State.ASLEEP
            self._room.plan()

    def _fail(self, error: BaseException, *, pauses: bool) -> None:
        """Note a failure, and give it to those who wait."""
        self.state, self.error = State.FAILED, reason_of(error)
        self.num_failures += 1
        pause = min(_FIRST_PAUSE * 2**self._num_in_row, _LONGEST_PAUSE) if pauses else 0.0
        self._num_in_row = min(self._num_in_row + 1, 16) if pauses else 0
        self._retry_at = self._clock() + pause
        self.refuse(self._unavailable(math.ceil(pause) or 1))

    def _unavailable(self, retry_after: int) -> ModelUnavailableError:
        return ModelUnavailableError(f"The model `{self.name}` cannot be loaded: {self.error}", retry_after)

    def _watch_idle(self) -> None:
        """Sleep after `keep_seconds` from now if no request comes."""
        self._stop_timer()
        if self.keep_seconds is None or self.num_running or self.state is not State.READY:
            return
        if self.keep_seconds <= 0:
            self.leave()
        else:
            self._timer = asyncio.get_running_loop().call_later(self.keep_seconds, self._leave_if_idle)

    def _leave_if_idle(self) -> None:
        self._timer = None
        if not self.num_running and self.state is State.READY:
            self.leave()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def reason_of(error: BaseException) -> str:
    """Return why a model could not be loaded, in words for clients."""
    if isinstance(error, (VLLMValidationError, EngineDeadError)):
        return str(error)
    return f"the server could not start its engine ({type(error).__name__})."


type AnyEntry = ModelEntry[Any]
