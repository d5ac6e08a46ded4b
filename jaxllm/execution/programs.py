"""Compiled programs: built ahead in the background, in an order that a waiting step may jump."""

from __future__ import annotations

import atexit
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from typing import Any

logger = logging.getLogger(__name__)

PAUSE = 3.0
"""How long a program that nobody has asked for waits, times what the last one took to compile. A load: none."""


class Programs[Key: Hashable]:
    """Programs by key, loaded or compiled ahead by one background thread; `get` does so at once for a missing one.

    First the first, then whatever `nearest` would rather have had, and the others in the order given, with pauses:
    compiling takes a core and Python from the rest of a start and from the steps. What is compiled when never changes
    a result, only when it is there.
    """

    def __init__(
        self,
        compile_one: Callable[[Key], Any],
        keys: Sequence[Key],
        *,
        ahead: bool,
        load: Callable[[Key], Any] = lambda _: None,
    ) -> None:
        """`load` returns what need not be compiled, else None."""
        self._compile, self._load = compile_one, load
        self._keys = tuple(keys)
        self._done: dict[Key, Any] = {}
        self._lock = threading.Lock()
        self._building: dict[Key, threading.Lock] = {}
        self._num_compiled = 0
        self._asked: deque[Any] = deque()  # of keys
        self._wake = threading.Event()
        """Set when there is something to do at once: to compile what was asked for, or to stop."""
        self._is_stopped = False
        self._thread: threading.Thread | None = None
        if ahead:
            # A daemon, so that exit does not wait for the whole list; but it crashes a process that dies under it, so
            # exit does wait for the one program that is being compiled.
            self._thread = threading.Thread(target=self._run_ahead, name="jaxllm-compile", daemon=True)
            self._thread.start()
            atexit.register(self.stop)

    def get(self, key: Key) -> Any:
        """Return a program, compiling it now if it is not there."""
        program = self._done.get(key)
        return self._build(key) if program is None else program

    def nearest[Some: Hashable](self, keys: Sequence[Some]) -> Some:
        """Return which of some programs that do the same to use now, the best one first; it is compiled next.

        The first that is there, else the first that is being compiled; the best one if nothing is compiled ahead.
        """
        if self._thread is None or not self._thread.is_alive():
            return keys[0]
        if keys[0] not in self._building and keys[0] not in self._asked:
            self._asked.append(keys[0])
            self._wake.set()
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
        self._is_stopped = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join()

    def _run_ahead(self) -> None:
        while (key := self._next()) is not None:
            started, num_compiled = time.monotonic(), self._num_compiled
            try:
                self._build(key)
            except Exception:
                # The step that needs it compiles it again and raises to its caller.
                logger.exception("compiling %s ahead failed", key)
                return
            if self._num_compiled > num_compiled:
                self._wake.wait(PAUSE * (time.monotonic() - started))
            self._wake.clear()

    def _next(self) -> Key | None:
        """Return what to compile now, or None if that is nothing, any more."""
        if self._is_stopped:
            return None
        if self._asked:
            return self._asked.popleft()
        return next((key for key in self._keys if key not in self._done), None)

    def _build(self, key: Key) -> Any:
        with self._lock:
            building = self._building.setdefault(key, threading.Lock())
        with building:
            if key not in self._done:
                program = self._load(key)
                if program is None:
                    program = self._compile(key)
                    self._num_compiled += 1
                self._done[key] = program
            return self._done[key]
