"""A CPU's large arrays in pages of 2 MiB, as far as Linux has them.

Of the usual 4 KiB a processor knows the places of too few: who reads gigabytes waits for places more than for memory.
"""

from __future__ import annotations

import ctypes
import sys

from jax import Array

PAGE_BYTES = 2 << 20
LEAST_PAGES = 8
"""How many pages each part of an array must fill, as memory is taken by whole pages where a part is begun."""
MADV_HUGEPAGE = 14
"""What Linux' `madvise` is told."""


def use_huge_pages(array: Array, num_parts: int) -> None:
    """Ask for pages of 2 MiB for an array that nobody has written to, if each of its parts fills several.

    It is no error where the system has none.
    """
    if sys.platform != "linux":
        return
    for shard in array.addressable_shards:
        data = shard.data
        if data.nbytes < LEAST_PAGES * PAGE_BYTES * num_parts:
            continue
        start = -(-data.unsafe_buffer_pointer() // PAGE_BYTES) * PAGE_BYTES
        size = (data.unsafe_buffer_pointer() + data.nbytes - start) // PAGE_BYTES * PAGE_BYTES
        ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), MADV_HUGEPAGE)
