"""The KV blocks: which are free, which are shared, and which still hold a cached prefix.

A block without a holder is *free* or *cached*. Both wait in one list in LRU order; a cached block loses its content
only when an allocation reaches it. The law: free + cached + in use == total.
"""

from __future__ import annotations

import hashlib
import os
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

from jaxllm.scheduling.cache.block_residency import BlockResidency

NULL_BLOCK = 0
"""The block that padding writes to; no request ever holds it."""


class LinkedBlocks:
    """Block ids in a doubly linked list, with removal from the middle in constant time."""

    def __init__(self, num_blocks: int) -> None:
        # The list is a ring closed by the null block, which is never in it, so that no end needs a special case.
        self._next = array("i", range(num_blocks))
        self._previous = array("i", range(num_blocks))
        self._len = 0

    def append(self, block_id: int) -> None:
        self._insert(self._previous[NULL_BLOCK], block_id, NULL_BLOCK)

    def prepend(self, block_id: int) -> None:
        self._insert(NULL_BLOCK, block_id, self._next[NULL_BLOCK])

    def _insert(self, before: int, block_id: int, after: int) -> None:
        self._next[before] = self._previous[after] = block_id
        self._previous[block_id], self._next[block_id] = before, after
        self._len += 1

    def remove(self, block_id: int) -> None:
        before, after = self._previous[block_id], self._next[block_id]
        self._next[before], self._previous[after] = after, before
        self._len -= 1

    def pop_first(self) -> int:
        if not self._len:
            raise IndexError("no free block")
        block_id = self._next[NULL_BLOCK]
        self.remove(block_id)
        return block_id

    def __iter__(self) -> Iterator[int]:
        block_id = self._next[NULL_BLOCK]
        while block_id != NULL_BLOCK:
            yield block_id
            block_id = self._next[block_id]

    def __len__(self) -> int:
        return self._len


class BlockPool:
    """Hand out blocks, count who holds them, and remember full ones by the hash of everything up to their end."""

    def __init__(self, num_blocks: int, residency: BlockResidency | None = None) -> None:
        """Have `num_blocks` blocks; `residency` follows some of them."""
        self.num_blocks = num_blocks
        self.residency = residency
        self.on_evicted: Callable[[int, bytes, bytes], None] = lambda *_: None
        """It is called with the id, the hash and the token bytes of a block that is taken and loses its content."""
        self.num_cached = 0
        """Blocks without a holder, with content that can still be found."""
        self._root_hash = os.urandom(32)
        self._num_holders = array("i", bytes(4 * num_blocks))
        self._unheld = LinkedBlocks(num_blocks)
        self._block_by_hash: dict[bytes, int] = {}
        self._content: dict[int, tuple[bytes, bytes]] = {}
        """Block id -> (its hash, the bytes of its token ids), for blocks that can be found."""
        for block_id in range(1, num_blocks):
            self._unheld.append(block_id)

    @property
    def num_available(self) -> int:
        """Return the number of blocks that can be taken: free and cached."""
        return len(self._unheld)

    @property
    def num_findable(self) -> int:
        """Return the number of blocks with content that can be found, held or not."""
        return len(self._content)

    @property
    def num_in_use(self) -> int:
        return self.num_blocks - 1 - len(self._unheld)

    def is_held(self, block_id: int) -> bool:
        return self._num_holders[block_id] > 0

    def is_private(self, block_id: int) -> bool:
        """Return whether a block has a single holder, and cannot be found by others."""
        return self._num_holders[block_id] == 1 and block_id not in self._content

    def hash_block(self, parent: bytes | None, token_bytes: bytes, extra_key: bytes = b"") -> bytes:
        """Hash a block's content and, through the parent's hash, all that precedes it (None: nothing precedes it)."""
        # Parent and token bytes have fixed lengths, so the rest can only be the extra key.
        return hashlib.sha256((parent or self._root_hash) + token_bytes + extra_key).digest()

    def find(self, block_hash: bytes, token_bytes: bytes) -> int | None:
        """Return the block with this content, or None."""
        block_id = self._block_by_hash.get(block_hash)
        # Comparing the tokens turns a hash collision into a miss.
        if block_id is None or self._content[block_id][1] != token_bytes:
            return None
        return block_id

    def register(self, block_id: int, block_hash: bytes, token_bytes: bytes) -> None:
        """Make a held, full block findable. Of two blocks with the same content the first stays the registered one."""
        if block_hash not in self._block_by_hash and block_id not in self._content:
            self._block_by_hash[block_hash] = block_id
            self._content[block_id] = (block_hash, token_bytes)

    def forget(self, block_id: int) -> None:
        """Forget the content of a block without a holder; it is the next to be taken."""
        self._evict(block_id)
        self._unheld.remove(block_id)
        self._unheld.prepend(block_id)

    def take(self, num_blocks: int) -> array[int]:
        """Take the blocks that were released longest ago, forgetting what they held; raise IndexError if too few."""
        if num_blocks > len(self._unheld):
            raise IndexError(f"{num_blocks} blocks wanted, {len(self._unheld)} available")
        taken = array("i")
        for _ in range(num_blocks):
            block_id = self._unheld.pop_first()
            self._num_holders[block_id] = 1
            content = self._evict(block_id)
            if content is not None:
                self.on_evicted(block_id, *content)
            if self.residency is not None:
                self.residency.on_taken(block_id)
            taken.append(block_id)
        return taken

    def share(self, block_ids: Iterable[int]) -> None:
        """Add a holder to blocks."""
        for block_id in block_ids:
            if not self._num_holders[block_id]:
                self._unheld.remove(block_id)
                self.num_cached -= 1
            self._num_holders[block_id] += 1
            if self.residency is not None:
                self.residency.on_shared(block_id)

    def release(self, block_ids: Sequence[int]) -> None:
        """Drop one holder of each block; the blocks are in the order of the sequence."""
        # Last block first: a prefix without its tail is still useful, a tail without its prefix is not.
        for block_id in reversed(block_ids):
            self._num_holders[block_id] -= 1
            if self._num_holders[block_id]:
                continue
            if block_id in self._content:
                self._unheld.append(block_id)
                self.num_cached += 1
            else:
                self._unheld.prepend(block_id)

    def unheld(self) -> list[tuple[int, tuple[bytes, bytes]]]:
        """Return the blocks without a holder that can be found, each with its content, longest unused first."""
        return [(block_id, self._content[block_id]) for block_id in self._unheld if block_id in self._content]

    def forget_unheld(self) -> None:
        """Forget the content of all blocks without a holder."""
        for block_id in self._unheld:
            self._evict(block_id)

    def forget_all(self) -> bool:
        """Drop all content; return False, and drop nothing, while any block is in use."""
        if self.num_in_use:
            return False
        self._block_by_hash.clear()
        self._content.clear()
        self.num_cached = 0
        if self.residency is not None:
            self.residency.forget_all()
        return True

    def _evict(self, block_id: int) -> tuple[bytes, bytes] | None:
        """Forget a block's content, and return it: its hash and the bytes of its token ids."""
        content = self._content.pop(block_id, None)
        if content is not None:
            del self._block_by_hash[content[0]]
            self.num_cached -= 1
        return content

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Assert that the pool agrees with the live block tables."""
        holders = Counter(block_id for table in tables for block_id in table)
        unheld = list(self._unheld)
        cached = [block_id for block_id in unheld if block_id in self._content]
        num_free = len(unheld) - len(cached)
        assert len(unheld) == len(set(unheld)) == len(self._unheld), "the free list holds a block twice"
        assert not {NULL_BLOCK} & (holders.keys() | set(unheld)), "the null block is in circulation"
        assert not holders.keys() & set(unheld), "a block is both held and free"
        assert num_free + len(cached) + len(holders) == self.num_blocks - 1, "a block is lost"
        assert (len(cached), len(holders)) == (self.num_cached, self.num_in_use), "the counts are off"
        for block_id in range(self.num_blocks):
            assert self._num_holders[block_id] == holders[block_id], f"block {block_id}: wrong number of holders"
        assert self._block_by_hash == {h: block_id for block_id, (h, _) in self._content.items()}, "a hash is stale"
