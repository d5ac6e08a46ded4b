"""The gate of an asynchronous engine: whether requests may enter, have to wait, or are refused."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from jaxllm.engine.front.asleep import Asleep
from jaxllm.exceptions import EngineBusyError, EngineDeadError


def wake(waiter: asyncio.Future[None]) -> None:
    """Let a task go on that waits; one whose event loop is closed never will."""
    if not waiter.done() and not waiter.get_loop().is_closed():
        waiter.set_result(None)


class Flag:
    """A flag that tasks wait for. Unlike asyncio.Event it may be used on another event loop once the first is closed,
    as when a program calls asyncio.run twice.
    """

    __slots__ = ("_is_set", "_waiters")

    def __init__(self) -> None:
        """Make a flag that is set."""
        self._is_set = True
        self._waiters: list[asyncio.Future[None]] = []

    @property
    def is_set(self) -> bool:
        """Return whether the flag is set, so that nobody has to wait."""
        return self._is_set

    def set(self) -> None:
        """Wake all tasks that wait."""
        self._is_set = True
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            wake(waiter)

    def clear(self) -> None:
        """Make later tasks wait."""
        self._is_set = False

    async def wait(self, timeout: float | None = None) -> None:
        """Return as soon as the flag is set. Raises TimeoutError after `timeout` seconds."""
        async with asyncio.timeout(timeout):
            while not self._is_set:
                waiter = asyncio.get_running_loop().create_future()
                self._waiters.append(waiter)
                try:
                    await waiter
                finally:
                    if waiter in self._waiters:
                        self._waiters.remove(waiter)


class Gate:
    """The state that decides whether requests may enter: paused, asleep, or about to end."""

    def __init__(self) -> None:
        self.is_draining = False
        self.asleep = Asleep()
        self.unpaused = Flag()
        self.is_frozen = False
        """Whether running requests stay as they are during a pause."""

    @property
    def is_sleeping(self) -> bool:
        """Return whether the engine sleeps."""
        return self.asleep.level > 0

    def check_awake(self, dead_error: EngineDeadError | None) -> None:
        """Raise EngineBusyError while the engine sleeps; `dead_error` is what has ended the core, if anything has."""
        self.asleep.check_awake()
        if dead_error is not None:
            raise dead_error

    def check_open(self) -> None:
        """Raise EngineBusyError if the engine is draining: it still runs, but takes no more requests."""
        if self.is_draining:
            raise EngineBusyError("The engine is about to end, and takes no more requests: another one may.")

    def end(self) -> None:
        """Wake all tasks that wait, because the engine ends."""
        self.asleep.end()
        self.unpaused.set()

    def drain(self) -> None:
        """Refuse requests from now on, including those that wait."""
        self.is_draining = True
        self.unpaused.set()


class Changes:
    """Makes an engine's changes between sleeping and waking, one after the other. For one event loop at a time."""

    def __init__(self) -> None:
        self._change: asyncio.Future[None] | None = None
        """The change that is under way, or the last one."""

    async def make(
        self, finish: Callable[[], Coroutine[Any, Any, None]], begin: Callable[[], Awaitable[None]] | None = None
    ) -> None:
        """Await `begin()`, if it is given, and then `finish()`, once no other change is under way.

        A caller that is cancelled cancels `begin`, which has to undo what it did; `finish` goes on to its end.
        """
        await self.wait()
        loop = asyncio.get_running_loop()
        change = self._change = loop.create_future()
        try:
            if begin is not None:
                await begin()
            finishing = loop.create_task(finish())
        except BaseException:
            wake(change)
            raise
        finishing.add_done_callback(lambda _: wake(change))
        await asyncio.shield(finishing)

    async def wait(self) -> None:
        """Wait until no change is under way; a change of a closed event loop is not waited for."""
        loop = asyncio.get_running_loop()
        while (change := self._change) is not None and change.get_loop() is loop and not change.done():
            await asyncio.wait([change])
