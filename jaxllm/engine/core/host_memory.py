"""Let the C allocator keep the memory that a step frees, for the next step."""

from __future__ import annotations

import ctypes
import sys

from jaxllm.config.environment import tunes_malloc

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4
"""The parameters of glibc's `mallopt`, from malloc.h."""
_KEPT_BYTES = 1 << 30
"""The free memory at a heap's end that is not given back to the system."""


def keep_freed_memory() -> bool:
    """Let glibc keep freed memory, and return whether it does.

    XLA takes a step's temporary memory anew each time on a CPU, and glibc asks the system for every piece above 32 MiB:
    that of a step with 16 rows of 262,144 logits is such a piece, and the system clears it page by page, for a fifth of
    the step's time. The setting holds for the whole process, and stays; on threads other than the main one, for pieces
    of less than 64 MiB. Other C libraries, and an allocator that the process's environment tunes, stay as they are.
    """
    if sys.platform != "linux" or tunes_malloc():
        return False
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "gnu_get_libc_version"):
        return False
    return bool(libc.mallopt(M_MMAP_MAX, 0)) and bool(libc.mallopt(M_TRIM_THRESHOLD, _KEPT_BYTES))
