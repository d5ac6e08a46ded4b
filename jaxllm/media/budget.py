"""Share a number of bytes among the threads that decode, so that not all of them hold large items at once."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class ByteBudget:
    """Bytes that threads take and give back. Those that wait get theirs in the order in which they came."""

    def __init__(self, num_bytes: int) -> None:
        """Make a budget of this many bytes."""
        self._num_bytes = self._free = num_bytes
        self._turn = threading.Lock()
        self._changed = threading.Condition()

    @contextmanager
    def hold(self, num_bytes: int) -> Iterator[None]:
        """Hold bytes, after waiting until they are free; what needs more than there are holds them all."""
        wanted = min(num_bytes, self._num_bytes)
        with self._turn, self._changed:
            self._changed.wait_for(lambda: self._free >= wanted)
            self._free -= wanted
        try:
            yield
        finally:
            with self._changed:
                self._free += wanted
                self._changed.notify_all()
