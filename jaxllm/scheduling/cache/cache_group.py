"""Cache groups: layers with one shape of keys and values and one window, which share blocks and tables."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence

from jaxllm.scheduling.cache.block_pool import NULL_BLOCK, BlockPool
from jaxllm.scheduling.cache.block_residency import BlockResidency
from jaxllm.scheduling.config import GroupConfig


class CacheGroup:
    """The blocks of one group: those that a table needs at a position, and those that can be found.

    A table has an entry for each block of the request's tokens, the null block if no later token reads it.
    """

    def __init__(self, config: GroupConfig, block_size: int, residency: BlockResidency | None) -> None:
        self.pool = BlockPool(config.num_blocks, residency)
        self._config, self._block_size = config, block_size

    def first_wanted(self, position: int) -> int:
        """Return the index in a table of the first block that tokens from a position on read."""
        return self._config.first_wanted(position, self._block_size)

    def next_trim(self, position: int) -> int:
        """Return the first position after `position` at which `trim` gives back more."""
        return self._config.next_trim(position, self._block_size)

    def num_missing(self, held: Sequence[int], num_tokens: int, most_new: int) -> int:
        """Return the blocks to take until num_tokens tokens are computed, at most `most_new` of them in a step.

        `held` are the blocks that the request has; those without another holder need not be taken.
        """
        total = -(-num_tokens // self._block_size)
        num_missing = total - len(held)
        if self._config.is_bounded:
            # Blocks behind a window or a chunk are given back before a step takes more.
            most = self._config.most_blocks(num_tokens, most_new, self._block_size)
            num_missing = min(num_missing, max(0, most - sum(block_id != NULL_BLOCK for block_id in held)))
        revived = sum(block_id != NULL_BLOCK and not self.pool.is_held(block_id) for block_id in held)
        return num_missing + revived

    def trim(self, block_ids: array[int], num_trimmed: int, position: int) -> int:
        """Give back the blocks that no token from a position on reads; return the number given back so far."""
        first = self.first_wanted(position)
        if first > num_trimmed:
            self.release(block_ids[num_trimmed:first])
            block_ids[num_trimmed:first] = array("i", [NULL_BLOCK]) * (first - num_trimmed)
        return max(first, num_trimmed)

    def release(self, block_ids: Sequence[int]) -> None:
        """Drop one holder of each block; the blocks are in the order of the sequence."""
        self.pool.release([block_id for block_id in block_ids if block_id != NULL_BLOCK])

    def longest(self, num_blocks: int, find: Callable[[int], int | None]) -> int:
        """Return the most leading blocks, up to num_blocks, after which a request can go on.

        `find` returns the block at an index, if it can be found.
        """
        if not self._config.is_bounded:
            return next((place for place in range(num_blocks) if find(place) is None), num_blocks)
        # From the end on: the last index at which a request finds all that it reads.
        end = index = num_blocks
        while index > self.first_wanted(end * self._block_size):
            index -= 1
            if find(index) is None:
                end = index
        return end

    def check(self, tables: Iterable[tuple[Sequence[int], int]]) -> None:
        """Assert that the pool agrees with the live tables, each with the number of blocks that it gave back."""
        tables = list(tables)
        for block_ids, num_trimmed in tables:
            assert not any(block_ids[:num_trimmed]), "a block that was given back is still in a table"
            assert all(block_ids[num_trimmed:]), "a table lacks a block that is still read"
        self.pool.check([block_ids[num_trimmed:] for block_ids, num_trimmed in tables])
