"""Threads that run llguidance. Its compiler and parser recurse with the grammar, and a stack overflow in Rust ends the
process, so these threads have stacks far larger than any accepted grammar needs.
"""

from __future__ import annotations

import atexit
import queue
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import suppress
from typing import Any, NamedTuple

_STACK_BYTES = 512 << 20
"""Reserved, not touched: compiling takes about 6 KB per level, and limits.MAX_DEPTH bounds the levels."""
MAX_ABANDONED = 4
_EXIT_SECONDS = 2.0

_STACK_SIZE_LOCK = threading.Lock()  # threading.stack_size applies to the process, not to one thread


class _Call(NamedTuple):
    run: Callable[[], Any]
    future: Future[Any]
    seconds: float
    late: str


type _Calls = queue.SimpleQueue[_Call | None]


class _Threads:
    """The threads of this process that run calls, supervisors included, with each one's queue of calls.

    They may outlive their callers, as late calls do, and must all end before Python ends.
    """

    def __init__(self) -> None:
        self.calls: weakref.WeakKeyDictionary[threading.Thread, _Calls] = weakref.WeakKeyDictionary()
        atexit.register(self._end)

    def start(self, thread: threading.Thread, calls: _Calls, stack: str) -> None:
        """Start a thread that runs `calls`. Raises RuntimeError, with the way out, if none can be started."""
        try:
            thread.start()
        except (RuntimeError, MemoryError) as error:
            message = (
                f"no thread with {stack} can be started ({error}); raise this process's limits of memory and threads"
            )
            raise RuntimeError(message) from error
        self.calls[thread] = calls

    def _end(self) -> None:
        """End all calls before Python ends: a thread that returns from Rust after that crashes the process."""
        threads = list(self.calls.items())
        for _, calls in threads:
            with suppress(queue.Empty):
                while True:
                    if (call := calls.get_nowait()) is not None:
                        call.future.set_exception(RuntimeError("Python is ending"))
            calls.put(None)
        deadline = time.monotonic() + _EXIT_SECONDS
        for thread, _ in threads:
            thread.join(max(0.0, deadline - time.monotonic()))


_THREADS = _Threads()


class BigStackThread:
    """A daemon thread with a big stack that runs calls one after another. It ends when this object is collected."""

    def __init__(self, name: str) -> None:
        self._calls: _Calls = queue.SimpleQueue()
        self.thread = threading.Thread(target=_work, args=(self._calls,), name=name, daemon=True)
        with _STACK_SIZE_LOCK:
            before = threading.stack_size(_STACK_BYTES)
            try:
                _THREADS.start(self.thread, self._calls, f"a stack of {_STACK_BYTES >> 20} MiB")
            finally:
                threading.stack_size(before)
        weakref.finalize(self, self._calls.put, None)

    def submit[T](self, run: Callable[[], T]) -> Future[T]:
        """Run `run` after the earlier calls."""
        future = _running_future()
        self._calls.put(_Call(run, future, 0.0, ""))
        return future


class DeadlineThread:
    """Runs calls one after another on a `BigStackThread`, each for a limited time.

    A late call fails with a TimeoutError. Its thread cannot be stopped and is abandoned; the next call gets a new one.
    While MAX_ABANDONED of them still run, calls fail at once.
    """

    def __init__(self, name: str) -> None:
        self._calls: _Calls = queue.SimpleQueue()
        thread = threading.Thread(target=_supervise, args=(self._calls, name), name=f"{name}-deadlines", daemon=True)
        _THREADS.start(thread, self._calls, "an ordinary stack")
        weakref.finalize(self, self._calls.put, None)

    def submit[T](self, run: Callable[[], T], seconds: float, late: str) -> Future[T]:
        """Run `run` after the earlier calls, for at most `seconds`; `late` is the message of the timeout."""
        future = _running_future()
        self._calls.put(_Call(run, future, seconds, late))
        return future


def _running_future() -> Future[Any]:
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()  # shared by callers: none of them may cancel it
    return future


def _work(calls: _Calls) -> None:
    while (call := calls.get()) is not None:
        try:
            result = call.run()
        except BaseException as error:  # noqa: BLE001 - a Rust panic is no Exception, and the caller must see it
            call.future.set_exception(error)
        else:
            call.future.set_result(result)
            del result
        del call  # an idle thread keeps nothing alive


def _supervise(calls: _Calls, name: str) -> None:
    worker: BigStackThread | None = None
    abandoned: list[threading.Thread] = []
    while (call := calls.get()) is not None:
        abandoned = [thread for thread in abandoned if thread.is_alive()]
        if len(abandoned) >= MAX_ABANDONED:
            call.future.set_exception(TimeoutError(f"{len(abandoned)} calls before it still run past their deadline"))
            continue
        try:
            worker = worker or BigStackThread(name)
        except RuntimeError as error:
            call.future.set_exception(error)
            continue
        if not _run_in_time(call, worker):
            abandoned.append(worker.thread)
            worker = None
        del call  # an idle thread keeps nothing alive


def _run_in_time(call: _Call, worker: BigStackThread) -> bool:
    """Run a call on `worker` and settle its future. Returns False if the worker still runs after the deadline."""
    inner = worker.submit(call.run)
    done, _ = wait([inner], call.seconds)
    if not done:
        call.future.set_exception(TimeoutError(call.late))
        return False
    error = inner.exception()
    if error is None:
        call.future.set_result(inner.result())
    else:
        call.future.set_exception(error)
    return True
