"""Block tables: which blocks hold each request's keys and values, and how much of them is computed.

A request starts with a `PrefixHit`: blocks of the prefix cache, or of a donor, another request that begins with the
same tokens. Full blocks are shared, since nobody writes to them again. A block that is not full has one writer: a
second request gets a copy.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from jaxllm.scheduling.block_pool import BlockPool
from jaxllm.scheduling.block_residency import BlockResidency
from jaxllm.scheduling.config import SchedulerConfig
from jaxllm.scheduling.request import Request


@dataclass(slots=True)
class BlockTable:
    """The blocks of one request, in the order of its tokens."""

    block_ids: array[int]
    num_computed_tokens: int
    """Positions whose keys and values are there; steps in flight are not counted."""
    num_registered: int
    """Leading full blocks that were offered to the prefix cache."""


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """The leading tokens of a request that others have computed."""

    block_ids: array[int]
    """Blocks to hold too."""
    num_tokens: int
    copied_block: int | None = None
    """The block with the tokens after those in `block_ids`, if a copy of it is to follow them."""


class KVCacheManager:
    """Open, grow, close and park block tables, and find prefixes that are already computed."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.block_size = config.block_size
        self.enable_prefix_caching = config.enable_prefix_caching
        sample = config.kv_cache_metrics_sample if config.enable_prefix_caching else None
        self.pool = BlockPool(config.num_blocks, None if sample is None else BlockResidency(sample))
        self._keys_depend_on_prompt = config.keys_depend_on_prompt
        self.tables: dict[str, BlockTable] = {}
        """The tables of the running requests, by id."""
        self.parked: dict[str, tuple[Request, BlockTable]] = {}
        """The tables of ended requests, kept for forks, by id, oldest first. It is a cache: any may go at any time."""

    # -- prefix hits ---------------------------------------------------------------------------------------------------

    def find_prefix(self, request: Request, num_donated: int, takes_over: bool) -> PrefixHit:
        """Return the longest hit to be had; the request's last token is always left to compute.

        num_donated: leading tokens of the donor that are computed or planned. takes_over: whether the donor ends with
        this fork, so that its last block needs no copy.
        """
        if request.is_scored:
            return PrefixHit(array("i"), 0)
        num_wanted = request.num_tokens - 1
        donated = self._find_donated(request, min(num_donated, num_wanted), takes_over)
        if donated.num_tokens == num_wanted or not self.looks_up(request):
            return donated
        cached = self._find_cached(request, num_wanted // self.block_size)
        num_cached = len(cached) * self.block_size
        return PrefixHit(cached, num_cached) if num_cached > donated.num_tokens else donated

    def looks_up(self, request: Request) -> bool:
        """Say whether the request's tokens are looked up in the prefix cache."""
        return self.enable_prefix_caching and request.reads_cache and not request.is_scored

    def _find_cached(self, request: Request, max_blocks: int) -> array[int]:
        found = array("i")
        for index in range(max_blocks):
            block_id = self.pool.find(self._hash(request, index), self._token_bytes(request, index))
            if block_id is None:
                break
            found.append(block_id)
        return found

    def _find_donated(self, request: Request, max_tokens: int, takes_over: bool) -> PrefixHit:
        donor = request.donor
        table = None if donor is None else self.table_of(donor)
        if donor is None or table is None or not self._may_share(request, donor):
            return PrefixHit(array("i"), 0)
        num_tokens = common_length(request.token_ids, donor.token_ids, max_tokens)
        num_full, rest = divmod(num_tokens, self.block_size)
        shared = table.block_ids[:num_full]
        if not rest:
            return PrefixHit(shared, num_tokens)
        block_id = table.block_ids[num_full]
        if takes_over and self.pool.is_private(block_id):
            shared.append(block_id)
            return PrefixHit(shared, num_tokens)
        return PrefixHit(shared, num_tokens, block_id)

    def _may_share(self, request: Request, donor: Request) -> bool:
        if self._keys_depend_on_prompt and donor.num_prompt_tokens != request.num_prompt_tokens:
            return False
        return donor.source.cache_salt == request.source.cache_salt

    def table_of(self, request: Request) -> BlockTable | None:
        """Return a request's table, running or parked."""
        if request.finish_reason is None:
            return self.tables.get(request.request_id)
        parked, table = self.parked.get(request.request_id, (None, None))
        return table if parked is request else None

    # -- tables --------------------------------------------------------------------------------------------------------

    def fits(self, num_tokens: int, hit: PrefixHit) -> bool:
        """Say whether num_tokens positions fit in the blocks now available, beside those of this hit."""
        shared = hit.block_ids
        num_revived = sum(not self.pool.is_held(block_id) for block_id in shared)
        return self._num_blocks(num_tokens) - len(shared) + num_revived <= self.pool.num_available

    def open_table(self, request: Request, hit: PrefixHit, num_tokens: int) -> BlockTable:
        """Give the request a table that covers num_tokens positions, more than its hit; they must fit."""
        block_ids, num_begun = hit.block_ids[:], hit.num_tokens
        self.pool.share(block_ids)
        table = BlockTable(block_ids, num_begun, num_begun // self.block_size)
        self.tables[request.request_id] = table
        self.grow(table, num_tokens)
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

    # -- parked tables -------------------------------------------------------------------------------------------------

    def park(self, request: Request) -> None:
        """Keep the table of a request that has ended, in place of one kept under the same id."""
        self.close_parked(request.request_id)
        self.parked[request.request_id] = request, self.tables.pop(request.request_id)

    def close_parked(self, request_id: str) -> None:
        """Release the blocks that are parked under this id, if any."""
        if request_id in self.parked:
            _, table = self.parked.pop(request_id)
            self.pool.release(table.block_ids)

    def give_up_parked(self, spared: Collection[Request]) -> bool:
        """Close the oldest parked table that is not of a spared request; return False if there is none."""
        for request, _ in self.parked.values():
            if request not in spared:
                self.close_parked(request.request_id)
                return True
        return False

    def check(self, running: Mapping[Request, int]) -> None:
        """Assert the laws of pool and tables; `running` maps each running request to its tokens in flight."""
        assert self.tables.keys() == {request.request_id for request in running}, "tables and running differ"
        assert all(request.finish_reason for request, _ in self.parked.values()), "a live request is parked"
        owned = [(request, self.tables[request.request_id]) for request in running] + list(self.parked.values())
        for request, table in owned:
            num_full = table.num_computed_tokens // self.block_size
            assert len(table.block_ids) >= self._num_blocks(table.num_computed_tokens), "computed beyond the table"
            assert table.num_computed_tokens < request.num_tokens, "a request has nothing to compute"
            assert not self.enable_prefix_caching or table.num_registered >= num_full, "a full block is not registered"
        for request, num_in_flight in running.items():
            table = self.tables[request.request_id]
            first_written = (table.num_computed_tokens + num_in_flight) // self.block_size
            for block_id in table.block_ids[first_written:]:
                assert self.pool.is_private(block_id), f"block {block_id} will be written to and has two holders"
        self.pool.check(table.block_ids for _, table in owned)

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
            salt = b"" if hashes else request.salt
            hashes.append(self.pool.hash_block(parent, self._token_bytes(request, len(hashes)), salt))
        return hashes[index]


def common_length(left: array[int], right: array[int], at_most: int) -> int:
    """Count the leading items in which two arrays agree, up to a limit."""
    low, high = 0, min(len(left), len(right), at_most)
    if left[:high] == right[:high]:
        return high
    while low + 1 < high:  # they agree up to low and differ before high
        middle = (low + high) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle
    return low
