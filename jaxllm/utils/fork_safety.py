"""A fork copies an engine's memory, but neither its threads nor its devices' threads: children must not use it.

A process that was started for another one ends with it.
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

PARENT_SECONDS = 0.5
"""How often a process looks whether its parent has ended, where the system does not tell."""


class Home:
    """The process that an engine was made in is the only one that can use it."""

    def __init__(self) -> None:
        self._pid = os.getpid()

    @property
    def is_here(self) -> bool:
        """Say whether this is that process, and not a child forked from it."""
        return os.getpid() == self._pid

    def check(self) -> None:
        """Raise RuntimeError in a forked child, where a call would wait for ever."""
        if not self.is_here:
            raise RuntimeError(
                f"There is an engine in process {self._pid}, from which process {os.getpid()} was forked. A fork "
                "copies neither threads nor devices, so no engine can be used or made here. Start children with "
                "multiprocessing.get_context('spawn'), and make an LLM in each that needs one."
            )


def end_with(parent: int, last: Callable[[], None] = lambda: None) -> None:
    """End this process, however busy, as soon as its parent has ended, of which it may be an orphan already.

    `parent` is the id that the parent has given, and `last` what is called before the end, in a thread.
    """
    threading.Thread(target=_end_with, args=(parent, last), name="jaxllm-parent", daemon=True).start()


def _end_with(parent: int, last: Callable[[], None]) -> None:
    # Not every system has such descriptors. The parent's id, compared once this is open, is the right process's.
    with contextlib.suppress(OSError):
        descriptor = os.pidfd_open(parent)
        if os.getppid() == parent:
            select.select([descriptor], [], [])
    while os.getppid() == parent:
        time.sleep(PARENT_SECONDS)
    try:
        last()
    finally:
        os._exit(1)


@cache
def engines_home() -> Home:
    """Return the process of the first engine; children that are forked from it can make none.

    Nor do they free anything of JAX's own: a client or a pool that a fork has cut off from its threads hangs or crashes
    the child that frees it, at the latest when it exits.
    """
    os.register_at_fork(after_in_child=_keep_all)
    return Home()


def check_home() -> None:
    """Raise RuntimeError in a child that was forked from a process with an engine, before it starts one."""
    if engines_home.cache_info().currsize:
        engines_home().check()


def _keep_all() -> None:
    names = [name for name in sys.modules if name.partition(".")[0] in ("jax", "jaxlib")]
    for value in [value for name in names for value in vars(sys.modules[name]).values()]:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))
