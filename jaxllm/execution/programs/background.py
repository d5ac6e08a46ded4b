"""Compile programs ahead in the background; a program that a step waits for comes first."""

from __future__ import annotations

import atexit
import contextlib
import logging
import signal
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, NamedTuple

from jaxllm.exceptions import EngineDeadError
from jaxllm.utils.fork_safety import Home
from jaxllm.utils.freed_memory import give_back
from pallas_kernels.native import cores

logger = logging.getLogger(__name__)

_MANY_CORES = 8
"""From this many cores on, compilers leave enough of them to the host of an accelerator, and need no pauses."""
_POLL_SECONDS = 0.05


class Pace(NamedTuple):
    """How fast programs are compiled ahead."""

    num_threads: int
    pause: float
    """The pause after a compilation, as a multiple of its time; a load is followed by no pause."""


GENTLE, FAST = Pace(num_threads=1, pause=3.0), Pace(num_threads=4, pause=0.0)
"""Only one thread at a time can trace, which takes a third of the time: more than four would wait for each other."""


def find_pace(platform: str) -> Pace:
    """Return the pace for the cores that this process may use; a CPU's steps need all of them for themselves."""
    return FAST if platform != "cpu" and cores.num_cores() >= _MANY_CORES else GENTLE


class _Thread(threading.Thread):
    """The background thread of an engine's programs, which starts and joins the others."""

    is_stopping = False
    """True once it has to stop: it ends after the programs being compiled, which cannot be interrupted."""

    def run(self) -> None:
        """Compile, then return to the system the memory that compilers have freed."""
        super().run()  # so that the thread does not hold its engine's programs
        give_back()


class Programs[Key: Hashable]:
    """Programs by key, loaded or compiled ahead in the background; `get` does so at once for a missing one.

    The first key comes first, then the program that `nearest` would have preferred, then the others in order, at a
    pace: compiling takes cores and the interpreter from the rest of the start and from the steps. Rare programs that
    are on disk are not held until a step needs one: each takes memory.
    """

    def __init__(
        self,
        compile_one: Callable[[Key], Any],
        keys: Sequence[Key],
        *,
        ahead: bool,
        load: Callable[[Key], Any] = lambda _: None,
        is_kept: Callable[[Key], bool] = lambda _: False,
        rare: Iterable[Key] = (),
        pace: Pace = GENTLE,
    ) -> None:
        """Compile only programs for which `load` returns None; `is_kept` tells without loading whether it would not."""
        self._compile, self._load, self._is_kept = compile_one, load, is_kept
        self.keys, self._rare = tuple(keys), frozenset(rare)
        self._pace = pace
        self._ahead = iter(self.keys)
        """The keys are walked once: a file that is removed in between must not be compiled again and again."""
        self._done: dict[Key, Any] = {}
        self._lock = threading.Lock()
        self._waiting = threading.RLock()
        """The lock is held by a thread that waits for all programs, and compiles those that are missing."""
        self._building: dict[Key, threading.Lock] = {}
        self.num_compiled = 0
        """The number of programs that were compiled, not loaded."""
        self.is_warm = False
        """True once every program has been compiled ahead or waited for."""
        self.num_awaited = 0
        """The number of times that `get` has compiled or loaded a program for its caller."""
        self.is_awaited = False
        """True while `get` compiles or loads a program for its caller."""
        self._asked: deque[Any] = deque()  # of keys
        self._wake = threading.Event()
        """The event is set when there is something to do at once: a program to compile for a caller, or to stop."""
        self._is_stopped, self._has_ended = False, threading.Event()
        self._home = Home()
        self._thread: _Thread | None = None
        if ahead:
            # A daemon, so that exit does not wait for the whole list. A process that exits during a compilation
            # crashes, so exit waits for the programs that are being compiled, and keeps them. Exit hooks run last
            # first: that of weakref.finalize, which takes the constants of JAX's traces, is registered before ours.
            weakref.finalize(self, lambda: None).atexit = False
            atexit.register(self._stop_at_exit)
            self._thread = _Thread(target=self._run, name="jaxllm-compile", daemon=True)
            self._thread.start()

    def get(self, key: Key) -> Any:
        """Return a program; compile it now if it is missing."""
        program = self._done.get(key)
        if program is not None:
            return program
        self.is_awaited = True
        self.num_awaited += 1
        try:
            return self._build(key)
        finally:
            self.is_awaited = False

    def nearest[Some: Hashable](self, keys: Sequence[Some]) -> Some:
        """Return the key of the program to use now, among equivalent `keys`, the best one first; it is compiled next.

        It is the first that is compiled, else the first on disk, else the first that is being compiled; it is the best
        one if nothing is compiled ahead.
        """
        best = keys[0]
        if self._thread is None or not self._thread.is_alive():
            return best
        if best not in self._building and best not in self._asked:
            self._asked.append(best)
            self._wake.set()
        is_kept: Callable[[Any], bool] = self._is_kept
        are_quick = (self.__contains__, is_kept, self._building.__contains__)
        return next((key for is_quick in are_quick for key in keys if is_quick(key)), best)

    def wait(self) -> None:
        """Block until every program is compiled. Raises EngineDeadError if `stop`, in another thread, comes before."""
        with self._waiting:
            for key in self.keys:
                if self._is_stopped:
                    raise EngineDeadError("The engine was shut down before all its programs were compiled.")
                if self._is_missing(key):
                    self._build(key, holds=key not in self._rare)
            self.is_warm = True

    def __contains__(self, key: Hashable) -> bool:
        return key in self._done

    def __len__(self) -> int:
        return len(self._done)

    def begin_stop(self) -> None:
        """Compile nothing more ahead; do not wait for the current compilation. The compiling thread may call it."""
        self._is_stopped = True
        if self._thread is not None:
            self._thread.is_stopping = True
        self._wake.set()

    def stop(self) -> None:
        """Compile nothing more ahead, and wait for the current compilation. May be called twice.

        A forked child has no thread to stop.
        """
        if not self._home.is_here:
            return
        self.begin_stop()
        with self._waiting:
            pass
        if self._thread is not None:
            self._has_ended.wait()  # Python 3.12 takes a thread for ended if its join was interrupted
            self._thread.join()

    def _stop_at_exit(self) -> None:
        """Stop, or end the process at once if that is interrupted, as Ctrl-C ends one that does not handle it."""
        try:
            self.stop()
        except KeyboardInterrupt:
            with contextlib.suppress(OSError, ValueError):  # Python would write it later in its exit
                sys.stdout.flush()
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            signal.raise_signal(signal.SIGINT)

    def _run(self) -> None:
        try:
            self._wait_for_stopping()
            others = [
                threading.Thread(target=self._run_ahead, name="jaxllm-compile", daemon=True)
                for _ in range(1, self._pace.num_threads)
            ]
            for thread in others:
                thread.start()
            self._run_ahead()
            for thread in others:
                thread.join()
            self.is_warm = self.is_warm or not self._is_stopped
        finally:
            self._has_ended.set()
            # Only now: a process whose `stop` was interrupted waits again when it exits.
            atexit.unregister(self._stop_at_exit)

    def _wait_for_stopping(self) -> None:
        """Wait for the threads of engines that were dropped, for example by a notebook cell that runs again.

        Each of them ends after one more program. Without the wait, engines that come and go quickly would compile many
        programs at once, and each compilation takes memory.
        """
        others = [each for each in threading.enumerate() if isinstance(each, _Thread) and each is not self._thread]
        while not self._is_stopped and any(each.is_stopping and each.is_alive() for each in others):
            time.sleep(_POLL_SECONDS)

    def _run_ahead(self) -> None:
        while (task := self._next()) is not None:
            key, holds = task
            started, num_compiled = time.monotonic(), self.num_compiled
            try:
                self._build(key, holds=holds)
            except Exception:
                # The step that needs it compiles it again, and raises the error to its caller.
                logger.exception("compiling %s ahead failed", key)
            if self._pace.pause and self.num_compiled > num_compiled:
                self._wake.wait(self._pace.pause * (time.monotonic() - started))
            self._wake.clear()

    def _next(self) -> tuple[Key, bool] | None:
        """Return the key to compile now and whether to hold its program, or None if nothing is left to compile."""
        with self._lock:
            if self._is_stopped:
                return None
            if self._asked:
                return self._asked.popleft(), True
            key = next(filter(self._is_missing, self._ahead), None)
            return None if key is None else (key, key not in self._rare)

    def _is_missing(self, key: Key) -> bool:
        return key not in self._done and not (key in self._rare and self._is_kept(key))

    def _build(self, key: Key, *, holds: bool = True) -> Any:
        """Return a program; load or compile it if it is missing. Without `holds` it is only kept on disk."""
        with self._lock:
            building = self._building.setdefault(key, threading.Lock())
        with building:
            if key in self._done:
                return self._done[key]
            if not holds and self._is_kept(key):  # by a thread that was quicker
                return None
            program = self._load(key)
            if program is None:
                program = self._compile(key)
                with self._lock:
                    self.num_compiled += 1
            if holds or not self._is_kept(key):
                self._done[key] = program
            else:
                self._building.pop(key, None)
            return program
