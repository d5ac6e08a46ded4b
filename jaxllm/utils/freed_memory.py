"""Memory that was freed goes back to the system."""

from __future__ import annotations

import ctypes
import sys


def give_back() -> None:
    """Have C's allocator return the memory that is free to the system, where it is glibc's.

    It keeps what is freed for the next piece, in a heap of each thread, and other processes never get it: a compiler's
    heaps are several times as large as the programs that come of it.
    """
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)
