"""Compiled programs: built ahead in the background, in an order that a waiting step may jump."""

from __future__ import annotations

import atexit
import logging
import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any

logger = logging.getLogger(__name__)

PAUSE_SECONDS = 2.0
"""From the first program to the second, unless told to go on."""


class Programs[Key: Hashable]:
    """Programs by key. One background thread compiles them in the order given; `get` compiles a missing one at once.

    The first is compiled from the start, the others from `go_on`, or a while later: compiling is much Python, and would
    hold up the rest of a start and the first step. What is compiled when never changes a result, only when it is there.
    """

    def __init__(self, compile_one: Callable[[Key], Any], keys: Sequence[Key], *, ahead: bool) -> None:
        self._compile = compile_one
        self._keys = tuple(keys)
        self._done: dict[Key, Any] = {}
        self._lock = threading.Lock()
        self._building: dict[Key, threading.Lock] = {}
        self._stop, self._go_on = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None
        if ahead:
            # A daemon, so that exit does not wait for the whole list; but it crashes a process that dies under it, so
            # exit does wait for the one program that is being compiled.
            self._thread = threading.Thread(target=self._run_ahead, name="jaxllm-compile", daemon=True)
            self._thread.start()
            atexit.register(self.stop)

    def go_on(self) -> None:
        """Compile the others, too. May be called again."""
        self._go_on.set()

    def get(self, key: Key) -> Any:
        """Return a program, compiling it now if it is not there."""
        program = self._done.get(key)
        return self._build(key) if program is None else program

    def nearest[Some: Hashable](self, keys: Sequence[Some]) -> Some:
        """Return which of some programs that do the same to use now, the best one first.

        The first that is there, else the first that is being compiled; the best one if nothing is compiled ahead.
        """
        if self._thread is None or not self._thread.is_alive():
            return keys[0]
        there = [key for key in keys if key in self._done]
        return next(iter(there or [key for key in keys if key in self._building]), keys[0])

    def wait(self) -> None:
        """Block until every program is compiled."""
        for key in self._keys:
            self.get(key)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._done

    def __len__(self) -> int:
        return len(self._done)

    def stop(self) -> None:
        """Compile nothing further ahead; waits for the one being compiled. May be called twice."""
        atexit.unregister(self.stop)
        self._stop.set()
        self._go_on.set()
        if self._thread is not None:
            self._thread.join()

    def _run_ahead(self) -> None:
        for index, key in enumerate(self._keys):
            if self._stop.is_set():
                return
            try:
                self._build(key)
            except Exception:
                # The step that needs it compiles it again and raises to its caller.
                logger.exception("compiling %s ahead failed", key)
                return
            if index == 0:
                self._go_on.wait(PAUSE_SECONDS)

    def _build(self, key: Key) -> Any:
        with self._lock:
            building = self._building.setdefault(key, threading.Lock())
        with building:
            if key not in self._done:
                self._done[key] = self._compile(key)
            return self._done[key]
