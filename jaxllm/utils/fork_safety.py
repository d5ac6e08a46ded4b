"""Refuse the use of an engine in a forked child: a fork copies its memory, but none of its threads.

`end_with` ends a child process together with its parent.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import sys
import threading
import time
from collections.abc import Callable
from functools import cache

_PARENT_SECONDS = 0.5
"""Seconds between checks for the parent's end, on systems that do not notify."""


class Home:
    """The process that created an engine; no other process can use the engine."""

    def __init__(self) -> None:
        self._pid = os.getpid()

    @property
    def is_here(self) -> bool:
        """Return whether this is that process, and not a child forked from it."""
        return os.getpid() == self._pid

    def check(self) -> None:
        """Raise RuntimeError in a forked child, where a call would never return."""
        if not self.is_here:
            raise RuntimeError(
                f"There is an engine in process {self._pid}, from which process {os.getpid()} was forked. A fork "
                "copies neither threads nor devices, so no engine can be used or made here. Start children with "
                "multiprocessing.get_context('spawn'), and make an LLM in each that needs one."
            )


def end_with(parent: int, last: Callable[[], None] = lambda: None) -> None:
    """End this process, however busy, as soon as its parent ends, or at once if the parent has ended already.

    `parent` is the parent's process id. `last` is called before the end, in a thread.
    """
    threading.Thread(target=_end_with, args=(parent, last), name="jaxllm-parent", daemon=True).start()


def _end_with(parent: int, last: Callable[[], None]) -> None:
    # Not every system has such descriptors. The parent's id, compared once this is open, is the right process's.
    with contextlib.suppress(OSError):
        descriptor = os.pidfd_open(parent)
        if os.getppid() == parent:
            select.select([descriptor], [], [])
    while os.getppid() == parent:
        time.sleep(_PARENT_SECONDS)
    try:
        last()
    finally:
        os._exit(1)


@cache
def engines_home() -> Home:
    """Return the process of the first engine; children forked from it cannot create an engine.

    Such children do not free JAX's objects either: a client or pool without its threads hangs or crashes the child that
    frees it, at the latest when it exits.
    """
    os.register_at_fork(after_in_child=_keep_all)
    return Home()


def check_home() -> None:
    """Raise RuntimeError if this process was forked from one with an engine."""
    if engines_home.cache_info().currsize:
        engines_home().check()


def _keep_all() -> None:
    names = [name for name in sys.modules if name.partition(".")[0] in ("jax", "jaxlib")]
    for value in [value for name in names for value in vars(sys.modules[name]).values()]:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))
