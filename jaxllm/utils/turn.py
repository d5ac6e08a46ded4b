"""Threads may share an engine: calls of an `LLM` happen in turn, those of an `LLMEngine` one after the other."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Concatenate, Protocol

from jaxllm.utils.fork_safety import Home


class Turn:
    """A turn lets one call in at a time: calls of other threads wait, and a call from within a call is refused."""

    def __init__(self) -> None:
        self.home = Home()
        self._lock = threading.Lock()
        self._thread: int | None = None
        """The thread whose call runs now."""
        self._call = ""

    @contextmanager
    def take(self, call: str) -> Iterator[None]:
        """Wait until no other thread's call runs; raise RuntimeError within a call of this thread."""
        self.check(call)
        with self._lock:
            try:
                self._thread, self._call = threading.get_ident(), call
                yield
            finally:
                self._thread = None

    def check(self, call: str) -> None:
        """Raise RuntimeError if a call of this thread is running already, as in a progress bar that it calls.

        So does a call in a forked child.
        """
        self.home.check()
        if self._thread == threading.get_ident():
            raise RuntimeError(
                f"LLM.{call}() was called from within LLM.{self._call}(), as by a progress bar or a signal handler: "
                "an LLM does one call at a time. Make the call afterwards, or on another LLM."
            )


class TakesTurns(Protocol):
    """An object whose methods happen in turn."""

    _turn: Turn


def in_turn[Owner: TakesTurns, **P, R](
    method: Callable[Concatenate[Owner, P], R],
) -> Callable[Concatenate[Owner, P], R]:
    """Make a method that runs in its object's turn."""

    @functools.wraps(method)
    def call_in_turn(self: Owner, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with self._turn.take(method.__name__):
            return method(self, *args, **kwargs)

    return call_in_turn


class FairLock:
    """A lock that goes to a waiting thread before the one that gives it back; who holds it may take it again.

    A plain lock goes to whoever is awake, so that a loop of steps takes it again and again before an abort gets it.
    """

    def __init__(self) -> None:
        # A signal handler may run, and take the lock, in a thread that waits for it.
        self._next = threading.RLock()
        self._lock = threading.RLock()
        self._holder: int | None = None

    @contextmanager
    def take(self) -> Iterator[None]:
        """Wait for the lock and hold it."""
        if self._holder == threading.get_ident():
            yield
            return
        with ExitStack() as waiting:
            waiting.enter_context(self._next)
            with self._lock:
                waiting.close()
                try:
                    self._holder = threading.get_ident()
                    yield
                finally:
                    self._holder = None


class HasLock(Protocol):
    """An object whose methods exclude each other."""

    _home: Home
    _lock: FairLock


def locked[Owner: HasLock, **P, R](
    method: Callable[Concatenate[Owner, P], R],
) -> Callable[Concatenate[Owner, P], R]:
    """Make a method that runs while no other thread is in a method of its object; in a forked child it raises."""

    @functools.wraps(method)
    def call_locked(self: Owner, /, *args: P.args, **kwargs: P.kwargs) -> R:
        self._home.check()
        with self._lock.take():
            return method(self, *args, **kwargs)

    return call_locked
