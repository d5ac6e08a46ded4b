"""Processed items are kept within a number of bytes, those used last the longest."""

from __future__ import annotations

import threading

from jaxllm.media.cache import CacheCounts, ProcessedCache
from jaxllm.media.processors import ProcessedImage
from jaxllm.media.shapes import ItemShape


def item(num_bytes: int) -> ProcessedImage:
    return ProcessedImage(bytes(num_bytes), ItemShape("image", ((1, 1, 1),), (1, 1)))


def test_the_item_used_longest_ago_goes_first():
    cache = ProcessedCache(300)
    items = {key: item(100) for key in "abc"}
    for key, value in items.items():
        cache.put(key, value)
    assert cache.get("a") is items["a"]
    cache.put("d", item(100))
    assert cache.get("b") is None
    assert cache.get("a") is items["a"]
    assert (len(cache), cache.num_bytes) == (3, 300)
    assert cache.counts == CacheCounts(queries=3, hits=2)


def test_an_item_over_the_bound_is_not_kept_and_removes_nothing():
    cache = ProcessedCache(300)
    cache.put("small", item(100))
    cache.put("large", item(304))
    assert cache.get("large") is None
    assert cache.get("small") is not None
    nothing = ProcessedCache(0)
    nothing.put("a", item(4))
    assert len(nothing) == 0


def test_an_item_put_again_counts_once():
    cache = ProcessedCache(300)
    for _ in range(5):
        cache.put("a", item(200))
    assert (len(cache), cache.num_bytes) == (1, 200)
    cache.clear()
    assert (len(cache), cache.num_bytes) == (0, 0)
    assert cache.get("a") is None


def test_threads_share_a_cache():
    cache = ProcessedCache(1000)

    def use(start: int) -> None:
        for number in range(200):
            key = str((start + number) % 17)
            if cache.get(key) is None:
                cache.put(key, item(100))

    threads = [threading.Thread(target=use, args=(start,)) for start in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert cache.counts.queries == 1600
    assert cache.num_bytes == 100 * len(cache) <= 1000
