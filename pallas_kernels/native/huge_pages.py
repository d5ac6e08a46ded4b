"""Put a CPU's large arrays into pages of 2 MiB, where Linux has them.

A processor caches the addresses of only a few of the usual 4 KiB pages, so reading gigabytes waits for addresses more
than for memory.
"""

from __future__ import annotations

import ctypes
import sys

from jax import Array

_PAGE_BYTES = 2 << 20
_LEAST_PAGES = 8
"""The number of pages that each part of an array must fill, since a whole page is taken as soon as a part is begun."""
_MADV_HUGEPAGE = 14
"""The advice that is passed to Linux' `madvise`."""


def use_huge_pages(array: Array, num_parts: int) -> None:
    """Ask for pages of 2 MiB for an array that nobody has written to, if each of its parts fills several.

    A system without them is no error.
    """
    if sys.platform != "linux":
        return
    for shard in array.addressable_shards:
        data = shard.data
        if data.nbytes < _LEAST_PAGES * _PAGE_BYTES * num_parts:
            continue
        start = -(-data.unsafe_buffer_pointer() // _PAGE_BYTES) * _PAGE_BYTES
        size = (data.unsafe_buffer_pointer() + data.nbytes - start) // _PAGE_BYTES * _PAGE_BYTES
        ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), _MADV_HUGEPAGE)
