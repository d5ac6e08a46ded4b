"""Measure how long KV blocks keep their content, on a sample of them: vLLM's kv_cache_metrics."""

from __future__ import annotations

import itertools
import random
import time
from collections import deque
from collections.abc import Callable

from jaxllm.core_messages import BlockEviction

_MAX_ACCESSES = 4
"""The number of a block's last accesses that are remembered."""


class _Residence:
    """One stay of content in a block."""

    __slots__ = ("accesses", "since")

    def __init__(self, now: float) -> None:
        self.since = now
        self.accesses: deque[float] = deque(maxlen=_MAX_ACCESSES)

    def end(self, now: float) -> BlockEviction:
        accesses = list(self.accesses)
        last = accesses[-1] if accesses else self.since
        gaps = [later - earlier for earlier, later in itertools.pairwise(accesses)]
        return BlockEviction(lifetime=now - self.since, idle=now - last, reuse_gaps=gaps)


class BlockResidency:
    """Follow a sample of the blocks from the time when they are taken until they are taken again."""

    def __init__(
        self,
        sample: float,
        clock: Callable[[], float] = time.monotonic,
        draw: Callable[[], float] | None = None,
    ) -> None:
        """Follow each block with probability `sample`, in (0, 1]; `draw` gives numbers in [0, 1)."""
        self._sample = sample
        self._clock = clock
        self._draw = random.Random().random if draw is None else draw
        self._residences: dict[int, _Residence] = {}
        self._ended: list[BlockEviction] = []

    def on_taken(self, block_id: int) -> None:
        """End the stay of the block's content, and begin another."""
        residence = self._residences.pop(block_id, None)
        if residence is not None:
            self._ended.append(residence.end(self._clock()))
        if self._draw() < self._sample:
            self._residences[block_id] = _Residence(self._clock())

    def on_shared(self, block_id: int) -> None:
        """Record that the block's content was found."""
        residence = self._residences.get(block_id)
        if residence is not None:
            residence.accesses.append(self._clock())

    def forget_all(self) -> None:
        """Stop following all blocks: all content was dropped."""
        self._residences.clear()
        self._ended.clear()

    def take_evictions(self) -> list[BlockEviction]:
        """Return the stays that have ended since the last call."""
        ended, self._ended = self._ended, []
        return ended
