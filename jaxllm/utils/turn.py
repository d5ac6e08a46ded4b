"""Locks that let threads share an engine: calls of an `LLM` take turns, those of an `LLMEngine` exclude each other."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Concatenate, Protocol

from jaxllm.utils.fork_safety import Home


class Turn:
    """Admit one call at a time: calls of other threads wait, and a nested call is refused."""

    def __init__(self) -> None:
        self.home = Home()
        self._lock = threading.Lock()
        self._thread: int | None = None
        """The thread of the running call."""
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
        """Raise RuntimeError if this thread is already in a call (in a progress bar's callback, say).

        Also raises in a forked child.
        """
        self.home.check()
        if self._thread == threading.get_ident():
            raise RuntimeError(
                f"LLM.{call}() was called from within LLM.{self._call}(), as by a progress bar or a signal handler: "
                "an LLM does one call at a time. Make the call afterwards, or on another LLM."
            )


class _TakesTurns(Protocol):
    """Base class of objects with methods that take turns."""

    _turn: Turn


def in_turn[Owner: _TakesTurns, **P, R](
    method: Callable[Concatenate[Owner, P], R],
) -> Callable[Concatenate[Owner, P], R]:
    """Decorate a method to run in its object's turn."""

    @functools.wraps(method)
    def call_in_turn(self: Owner, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with self._turn.take(method.__name__):
            return method(self, *args, **kwargs)

    return call_in_turn


class FairLock:
    """A fair, reentrant lock: a waiting thread gets it before the thread that released it.

    With a plain lock, a loop of steps would take it again and again before a waiting abort gets it.
    """

    def __init__(self) -> None:
        # A signal handler may run, and take the lock, in a thread that waits for it.
        self._next = threading.RLock()
        self._lock = threading.RLock()
        self._holder: int | None = None

    @contextmanager
    def take(self) -> Iterator[None]:
        """Wait for the lock and take it."""
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


class _HasLock(Protocol):
    """Base class of objects with methods that exclude each other."""

    _home: Home
    _lock: FairLock


def locked[Owner: _HasLock, **P, R](
    method: Callable[Concatenate[Owner, P], R],
) -> Callable[Concatenate[Owner, P], R]:
    """Decorate a method to exclude the object's other locked methods; it raises in a forked child."""

    @functools.wraps(method)
    def call_locked(self: Owner, /, *args: P.args, **kwargs: P.kwargs) -> R:
        self._home.check()
        with self._lock.take():
            return method(self, *args, **kwargs)

    return call_locked
