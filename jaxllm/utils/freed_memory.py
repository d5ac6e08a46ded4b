"""Return freed memory to the system."""

from __future__ import annotations

import ctypes
import sys


def give_back() -> None:
    """Make C's allocator, if it is glibc's, return its free memory to the system.

    By default it keeps freed memory in the heap of each thread, where other processes cannot use it. A compiler's heaps
    are several times as large as the programs it makes.
    """
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)
