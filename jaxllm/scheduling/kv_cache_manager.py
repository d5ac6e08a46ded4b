"""Block tables: which blocks hold each running request's keys and values, and how much of them is computed."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from jaxllm.scheduling.block_pool import BlockPool
from jaxllm.scheduling.request import Request


@dataclass(slots=True)
class BlockTable:
    """The blocks of one request, in the order of its tokens."""

    block_ids: array[int]
    num_computed_tokens: int
    """Positions whose keys and values are there; steps in flight are not counted."""
    num_registered: int
    """Leading full blocks that were offered to the prefix cache."""


class KVCacheManager:
    """Open, grow and close block tables, and find prefixes that are already computed."""

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool) -> None:
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.pool = BlockPool(num_blocks)
        self.tables: dict[str, BlockTable] = {}

    def find_prefix(self, request: Request) -> array[int]:
        """Return the cached blocks of the request's longest known prefix; its last token is always left to compute."""
        found = array("i")
        if not self.enable_prefix_caching:
            return found
        for index in range((request.num_tokens - 1) // self.block_size):
            block_id = self.pool.find(self._hash(request, index), self._token_bytes(request, index))
            if block_id is None:
                break
            found.append(block_id)
        return found

    def fits(self, num_tokens: int, prefix: Sequence[int]) -> bool:
        """Say whether num_tokens positions, of which the prefix is cached, fit in the blocks now available."""
        num_revived = sum(not self.pool.is_held(block_id) for block_id in prefix)
        return self._num_blocks(num_tokens) - len(prefix) + num_revived <= self.pool.num_available

    def open_table(self, request: Request, prefix: array[int]) -> BlockTable:
        """Give the request a table that starts with the cached prefix."""
        self.pool.share(prefix)
        table = BlockTable(prefix, len(prefix) * self.block_size, len(prefix))
        self.tables[request.request_id] = table
        return table

    def grow(self, table: BlockTable, num_tokens: int) -> bool:
        """Make the table cover num_tokens positions; return False, and change nothing, if blocks are short."""
        num_missing = self._num_blocks(num_tokens) - len(table.block_ids)
        if num_missing <= 0:
            return True
        if num_missing > self.pool.num_available:
            return False
        table.block_ids.extend(self.pool.take(num_missing))
        return True

    def register(self, request: Request, table: BlockTable, num_tokens: int) -> None:
        """Let the full blocks among the first num_tokens positions be found. Their token ids must be known."""
        num_full = num_tokens // self.block_size
        if num_full <= table.num_registered or not self.enable_prefix_caching:
            return
        for index in range(table.num_registered, num_full):
            token_bytes = self._token_bytes(request, index)
            self.pool.register(table.block_ids[index], self._hash(request, index), token_bytes)
        table.num_registered = num_full

    def close_table(self, request: Request) -> None:
        """Release the request's blocks; those that were registered can still be found."""
        self.pool.release(self.tables.pop(request.request_id).block_ids)

    def check(self, requests: Iterable[Request]) -> None:
        """Assert the laws of pool and tables; `requests` are those that should have a table."""
        requests = list(requests)
        assert self.tables.keys() == {request.request_id for request in requests}, "tables and running differ"
        for request in requests:
            table = self.tables[request.request_id]
            num_full = table.num_computed_tokens // self.block_size
            assert len(table.block_ids) >= self._num_blocks(table.num_computed_tokens), "computed beyond the table"
            assert table.num_computed_tokens < request.num_tokens, "a running request has nothing to compute"
            assert not self.enable_prefix_caching or table.num_registered >= num_full, "a full block is not registered"
        self.pool.check(table.block_ids for table in self.tables.values())

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _token_bytes(self, request: Request, index: int) -> bytes:
        start = index * self.block_size
        return request.token_ids[start : start + self.block_size].tobytes()

    def _hash(self, request: Request, index: int) -> bytes:
        """Return the hash of the request's index-th block, extending its chain as far as needed."""
        hashes = request.block_hashes
        while len(hashes) <= index:
            parent = hashes[-1] if hashes else None
            # The salt enters with the first block; the chain carries it to all the others.
            salt = "" if hashes else request.source.cache_salt or ""
            hashes.append(self.pool.hash_block(parent, self._token_bytes(request, len(hashes)), salt.encode()))
        return hashes[index]
