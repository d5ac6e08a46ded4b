"""A fork copies an engine's memory, but neither its threads nor its devices' threads: children must not use it."""

from __future__ import annotations

import ctypes
import os
import sys
from functools import cache


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
