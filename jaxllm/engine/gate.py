"""The gate of an asynchronous engine: whether requests may enter, have to wait, or are refused."""

from __future__ import annotations

import asyncio

from jaxllm.exceptions import EngineDeadError, VLLMValidationError
from jaxllm.params.checks import shown


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
        """Say whether nobody has to wait."""
        return self._is_set

    def set(self) -> None:
        """Let all go on that wait."""
        self._is_set = True
        waiters, self._waiters = self._waiters, []
        for each in waiters:
            if not each.done():
                each.set_result(None)

    def clear(self) -> None:
        """Let those wait that come from now on."""
        self._is_set = False

    async def wait(self) -> None:
        """Return as soon as the flag is set."""
        while not self._is_set:
            waiter = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            try:
                await waiter
            finally:
                if waiter in self._waiters:
                    self._waiters.remove(waiter)


class Gate:
    """This says whether requests may enter: an engine may be paused, asleep, or about to end."""

    def __init__(self) -> None:
        self.is_sleeping = self.is_draining = False
        self.unpaused = Flag()

    def check(self, dead_error: EngineDeadError | None) -> None:
        """Raise if no request is taken; `dead_error` is what has ended the core, if anything has."""
        if self.is_sleeping:
            raise RuntimeError("The engine sleeps: call wake_up() first.")
        if dead_error is not None:
            raise dead_error
        if self.is_draining:
            raise EngineDeadError("The engine takes no more requests: it is about to end.")

    def drain(self) -> None:
        """Refuse requests from now on, those that wait too."""
        self.is_draining = True
        self.unpaused.set()


def check_mode(mode: str) -> None:
    """Raise VLLMValidationError for a mode of pausing that is not there."""
    if mode not in ("abort", "wait"):
        message = f"mode must be 'abort' or 'wait', got {shown(mode)}: requests cannot be kept."
        raise VLLMValidationError(message, parameter="mode", value=mode)
