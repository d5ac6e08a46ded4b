"""Keep processed images and videos, so that one that comes again is not processed again."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass

from jaxllm.media.processors import ProcessedImage


@dataclass(frozen=True, slots=True)
class CacheCounts:
    """What a cache has done since it was made: numbers of look-ups, and of those that found their item."""

    queries: int
    hits: int


class ProcessedCache:
    """Processed items by the hash of their content and options, up to a number of bytes.

    The items that were used longest ago go first. Threads may share it.
    """

    def __init__(self, max_bytes: int) -> None:
        """Make an empty cache for items of `max_bytes` together; 0 keeps nothing."""
        self._max_bytes, self._num_bytes = max_bytes, 0
        self._queries = self._hits = 0
        self._items: OrderedDict[str, ProcessedImage] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """Return the number of items."""
        return len(self._items)

    @property
    def num_bytes(self) -> int:
        """Return the bytes of all items."""
        return self._num_bytes

    @property
    def counts(self) -> CacheCounts:
        """Return the numbers of look-ups and of hits; clearing does not reset them."""
        with self._lock:
            return CacheCounts(self._queries, self._hits)

    def get(self, key: str) -> ProcessedImage | None:
        """Return the item of a hash, from now on the one used last, or None."""
        with self._lock:
            self._queries += 1
            item = self._items.get(key)
            if item is not None:
                self._hits += 1
                self._items.move_to_end(key)
            return item

    def put(self, key: str, item: ProcessedImage) -> None:
        """Keep an item; one that alone exceeds the bound is not kept, and nothing goes for it."""
        if item.num_bytes > self._max_bytes:
            return
        with self._lock:
            self._remove(key)
            self._items[key] = item
            self._num_bytes += item.num_bytes
            while self._num_bytes > self._max_bytes:
                self._remove(next(iter(self._items)))

    def clear(self) -> None:
        """Remove all items."""
        with self._lock:
            self._items.clear()
            self._num_bytes = 0

    def _remove(self, key: str) -> None:
        """Remove an item if it is kept; the lock is held."""
        item = self._items.pop(key, None)
        if item is not None:
            self._num_bytes -= item.num_bytes
