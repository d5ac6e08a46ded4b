"""A read-only memory map of a whole file; arrays over it cost no memory until they are read."""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import NamedTuple

import numpy as np


class FileSpan(NamedTuple):
    """Bytes of a file, from byte `start` on."""

    path: Path
    start: int
    num_bytes: int


class MappedFile:
    """A file's bytes as one uint8 array, paged in on first use."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb") as file:
            self.size = file.seek(0, 2)
            # mmap fails on empty files.
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if self.size else None
        source = self._map if self._map is not None else b""
        self.bytes: np.ndarray = np.frombuffer(source, np.uint8)

    def view(self, start: int, num_bytes: int) -> np.ndarray:
        """Return bytes [start, start + num_bytes) as a read-only uint8 array."""
        if not 0 <= start <= start + num_bytes <= self.size:
            raise ValueError(f"bytes {start} to {start + num_bytes} are outside of a file of {self.size} bytes")
        return self.bytes[start : start + num_bytes]

    def drop(self, start: int, num_bytes: int) -> None:
        """Let the system reclaim the pages that lie wholly inside the range; they can still be read again."""
        if self._map is None or not hasattr(mmap, "MADV_DONTNEED"):
            return
        first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
        last = (start + num_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if last > first:
            self._map.madvise(mmap.MADV_DONTNEED, first, last - first)
