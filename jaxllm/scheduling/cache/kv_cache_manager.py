"""Block tables: the blocks of each request's keys and values, and the number of computed tokens.

A request starts with a `PrefixHit`: blocks of the prefix cache, or of a donor, another request that begins with the
same tokens. Full blocks are shared, since they are never written again. A block that is not full has one writer: a
second request gets a copy.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from jaxllm.scheduling.cache.block_pool import NULL_BLOCK, BlockPool
from jaxllm.scheduling.cache.block_residency import BlockResidency
from jaxllm.scheduling.cache.cache_group import CacheGroup
from jaxllm.scheduling.cache.state_slots import NO_SLOT, NO_SLOTS, ChunkSlots, RequestState, StateSlots
from jaxllm.scheduling.config import SchedulerConfig
from jaxllm.scheduling.media import agreeing_length, block_media
from jaxllm.scheduling.request import Request

_ELSEWHERE = -1
"""It stands for a block that is not in a pool."""
type Holder = CacheGroup | StateSlots
type GroupBlocks = tuple[array[int], ...]
"""The blocks of a request in each cache group, in the order of its tokens; null blocks where no later token reads."""


@dataclass(slots=True)
class BlockTable:
    """The blocks of one request."""

    block_ids: GroupBlocks
    num_computed_tokens: int
    """The number of positions with keys and values, without steps in flight."""
    num_registered: int
    """The number of leading full blocks that were registered in the prefix cache."""
    num_trimmed: list[int]
    """The number of leading blocks of each group that were given back: no later token reads them."""
    num_shared_tokens: int
    """The number of leading tokens whose blocks existed already, even if the state after them did not."""
    state: RequestState | None = None
    """The recurrent state, if the model has any."""
    num_drafted_tokens: int = 0
    """The number of positions that the draft model has read, including guesses. `DraftSteps` alone changes it."""
    _shown: GroupBlocks | None = None
    """A copy of the blocks; None once they have changed since it was made."""

    def shown(self) -> GroupBlocks:
        """Return a copy of the blocks, the same one until they change."""
        if self._shown is None:
            self._shown = tuple([block_ids[:] for block_ids in self.block_ids])
        return self._shown

    def on_change(self) -> None:
        """Note that the blocks have changed."""
        self._shown = None


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """The leading tokens of a request that others have computed."""

    block_ids: GroupBlocks
    """The blocks that hold them, to be shared."""
    num_tokens: int
    copied_blocks: tuple[int, ...] | None = None
    """In each group the block with the next tokens after `block_ids`, if it is to be copied."""
    state_slot: int = NO_SLOT
    """The slot with the state after these tokens, if the model has state and there are such tokens."""
    num_shared_tokens: int = 0
    """The number of leading tokens whose blocks exist: more than `num_tokens` if the state after them does not."""


class KVCacheManager:
    """Open, grow, trim, close and park block tables, and find prefixes that are already computed."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.block_size = config.block_size
        self.enable_prefix_caching = config.enable_prefix_caching
        sample = config.kv_cache_metrics_sample if config.enable_prefix_caching else None
        self.groups = tuple(
            CacheGroup(group, config.block_size, None if number or sample is None else BlockResidency(sample))
            for number, group in enumerate(config.groups)
        )
        """The first one measures the residency of its blocks, if it is measured."""
        self.is_bounded = any(group.is_bounded for group in config.groups)
        """True if running requests give blocks back in some group."""
        self.slots = StateSlots(config.num_state_slots) if config.num_state_slots else None
        """The slots of recurrent state; None where the model has none."""
        self._most_new, self._max_num_seqs = config.max_num_batched_tokens, config.max_num_seqs
        self._keys_depend_on_prompt, self._root_hash = config.keys_depend_on_prompt, config.root_hash
        self.nothing = PrefixHit(tuple(array("i") for _ in self.groups), 0)
        """The hit of a request whose beginning is not cached."""
        self.tables: dict[str, BlockTable] = {}
        """The tables of the running requests, by id."""
        self.parked: dict[str, tuple[Request, BlockTable]] = {}
        """The tables of ended requests, kept for forks, by id, oldest first. Any may be dropped at any time."""

    # -- prefix hits ---------------------------------------------------------------------------------------------------

    def find_prefix(self, request: Request, num_donated: int, takes_over: bool) -> PrefixHit:
        """Return the longest hit; the request's last token is always left to compute.

        num_donated: leading tokens of the donor that are computed or planned. takes_over: whether the donor ends with
        this fork, so that its last block needs no copy.
        """
        if request.is_scored:
            return self.nothing
        num_wanted = request.num_tokens - 1
        donated = self._find_donated(request, min(num_donated, num_wanted), takes_over)
        if donated.num_tokens == num_wanted or not self.looks_up(request):
            return donated
        cached = self._find_cached(request, num_wanted // self.block_size)
        return cached if cached.num_tokens >= donated.num_tokens else donated

    def looks_up(self, request: Request) -> bool:
        """Return whether the request's tokens are looked up in the prefix cache."""
        return self.enable_prefix_caching and request.reads_cache and not request.is_scored

    def _find_cached(self, request: Request, max_blocks: int) -> PrefixHit:
        num_shared = num_blocks = self._longest(request, max_blocks, self.groups)
        if self.slots is not None:
            num_blocks = self._longest(request, num_shared, (*self.groups, self.slots))
        num_tokens, block_ids = num_blocks * self.block_size, []
        for group in self.groups:
            first = min(group.first_wanted(num_tokens), num_blocks)
            wanted = (self.find(group.pool, request, place) or NULL_BLOCK for place in range(first, num_blocks))
            block_ids.append(array("i", [*[NULL_BLOCK] * first, *wanted]))
        has_state = self.slots is not None and num_blocks > 0
        slot = self.find(self.slots.pool, request, num_blocks - 1) if self.slots is not None and has_state else None
        return PrefixHit(tuple(block_ids), num_tokens, None, slot or NO_SLOT, num_shared * self.block_size)

    def _longest(self, request: Request, num_blocks: int, holders: Sequence[Holder]) -> int:
        """Return the most leading blocks, up to num_blocks, after which the request can continue with all holders."""
        return _longest(num_blocks, [(holder, partial(self.find, holder.pool, request)) for holder in holders])

    @property
    def holders(self) -> tuple[Holder, ...]:
        """Return what holds content for prefix hits: the groups, and the slots of recurrent state if there are any."""
        return self.groups if self.slots is None else (*self.groups, self.slots)

    def longest_in(self, request: Request, has: Callable[[int, tuple[bytes, bytes]], bool]) -> int:
        """Return the most leading blocks after which the request could continue with what is elsewhere too.

        `has` tells whether some content of a holder, by its number, is elsewhere. The last token is left to compute.
        """

        def find(number: int, pool: BlockPool, index: int) -> int | None:
            content = self.content_of(request, index)
            block_id = pool.find(*content)
            return _ELSEWHERE if block_id is None and has(number, content) else block_id

        num_blocks = (request.num_tokens - 1) // self.block_size
        holders = enumerate(self.holders)
        return _longest(num_blocks, [(holder, partial(find, number, holder.pool)) for number, holder in holders])

    def indices_in(self, num_blocks: int) -> list[range]:
        """Return, for each holder, the indices of the blocks that a request needs to continue after `num_blocks`."""
        firsts = [group.first_wanted(num_blocks * self.block_size) for group in self.groups]
        firsts += [] if self.slots is None else [num_blocks - 1]
        return [range(min(first, num_blocks), num_blocks) for first in firsts]

    def find(self, pool: BlockPool, request: Request, index: int) -> int | None:
        """Return the pool's block with the content of the request's block at an index, and of all before it."""
        return pool.find(*self.content_of(request, index))

    def content_of(self, request: Request, index: int) -> tuple[bytes, bytes]:
        """Return the hash of the request's block at an index, and the bytes of its token ids."""
        return self.hash_of(request, index), self._token_bytes(request, index)

    def _find_donated(self, request: Request, max_tokens: int, takes_over: bool) -> PrefixHit:
        donor = request.donor
        table = None if donor is None else self.table_of(donor)
        if donor is None or table is None or not self._may_share(request, donor):
            return self.nothing
        max_tokens = agreeing_length(request.media, donor.media, max_tokens)
        num_tokens = common_length(request.token_ids, donor.token_ids, max_tokens)
        slot = NO_SLOT
        if table.state is not None:
            num_tokens, slot = self._donated_state(table.state, num_tokens, has_ended=donor.finish_reason is not None)
        num_full, rest = divmod(num_tokens, self.block_size)
        firsts = [group.first_wanted(num_tokens) for group in self.groups]
        if any(trimmed > first for trimmed, first in zip(table.num_trimmed, firsts, strict=True)):
            return self.nothing  # the donor has continued, and has given back the wanted blocks
        groups = zip(table.block_ids, firsts, strict=True)
        shared = tuple(array("i", [NULL_BLOCK]) * min(first, num_full) + ids[first:num_full] for ids, first in groups)
        if not rest:
            return PrefixHit(shared, num_tokens, None, slot)
        last = tuple(block_ids[num_full] for block_ids in table.block_ids)
        if takes_over and all(group.pool.is_private(block) for group, block in zip(self.groups, last, strict=True)):
            for block_ids, block_id in zip(shared, last, strict=True):
                block_ids.append(block_id)
            return PrefixHit(shared, num_tokens, None, slot)
        return PrefixHit(shared, num_tokens, last, slot)

    def _donated_state(self, state: RequestState, max_tokens: int, *, has_ended: bool) -> tuple[int, int]:
        """Return the most tokens, up to a limit, after which a donor's state exists, and its slot."""
        # While the donor runs, the step that reads its own slot may also write to it.
        kept = [(state.saved_at, state.saved)] if state.saved != NO_SLOT else []
        kept += [(state.num_tokens, state.read)] if has_ended else []
        return max((each for each in kept if each[0] <= max_tokens), default=(0, NO_SLOT))

    def _may_share(self, request: Request, donor: Request) -> bool:
        if self._keys_depend_on_prompt and donor.num_prompt_tokens != request.num_prompt_tokens:
            return False
        return donor.salt == request.salt

    def table_of(self, request: Request) -> BlockTable | None:
        """Return a request's table, running or parked."""
        if request.finish_reason is None:
            return self.tables.get(request.request_id)
        parked, table = self.parked.get(request.request_id, (None, None))
        return table if parked is request else None

    # -- tables --------------------------------------------------------------------------------------------------------

    def fits(self, num_tokens: int, hit: PrefixHit) -> bool:
        """Return whether num_tokens positions fit in the available blocks and those of a hit."""
        if self.slots is not None and not self.slots.fits(hit.state_slot):
            return False
        return all(
            group.num_missing(shared, num_tokens, self._most_new) <= group.pool.num_available
            for group, shared in zip(self.groups, hit.block_ids, strict=True)
        )

    def open_table(self, request: Request, hit: PrefixHit, num_tokens: int) -> BlockTable:
        """Give the request a table that covers num_tokens positions, more than its hit; they must fit."""
        for group, shared in zip(self.groups, hit.block_ids, strict=True):
            group.pool.share(block_id for block_id in shared if block_id != NULL_BLOCK)
        firsts = [group.first_wanted(hit.num_tokens) for group in self.groups]
        block_ids = tuple(ids[:] for ids in hit.block_ids)
        table = BlockTable(block_ids, hit.num_tokens, hit.num_tokens // self.block_size, firsts, hit.num_shared_tokens)
        if self.slots is not None:
            table.state = self.slots.open(hit.state_slot, hit.num_tokens)
        self.tables[request.request_id] = table
        self.grow(table, num_tokens)
        return table

    def grow(self, table: BlockTable, num_tokens: int, spare: int = 0) -> bool:
        """Make the table cover num_tokens positions, and leave `spare` blocks.

        Return False, and change nothing, if blocks are short.
        """
        num_missing = self._num_blocks(num_tokens) - len(table.block_ids[0])
        if num_missing <= 0:
            return True
        if any(num_missing + spare > group.pool.num_available for group in self.groups):
            return False
        for group, block_ids in zip(self.groups, table.block_ids, strict=True):
            block_ids.extend(group.pool.take(num_missing))
        table.on_change()
        return True

    def trim(self, table: BlockTable, start: int) -> None:
        """Give back the blocks behind windows and chunks once all tokens before `start` are planned."""
        groups = zip(self.groups, table.block_ids, table.num_trimmed, strict=True)
        num_trimmed = [group.trim(block_ids, num, start) for group, block_ids, num in groups]
        if num_trimmed != table.num_trimmed:
            table.num_trimmed = num_trimmed
            table.on_change()

    def register(self, request: Request, table: BlockTable, num_tokens: int) -> None:
        """Register the full blocks among the first num_tokens positions, with known token ids, in the prefix cache."""
        num_full = num_tokens // self.block_size
        if num_full <= table.num_registered or not self.enable_prefix_caching:
            return
        for index in range(table.num_registered, num_full):
            block_hash, token_bytes = self.content_of(request, index)
            for group, block_ids in zip(self.groups, table.block_ids, strict=True):
                if block_ids[index] != NULL_BLOCK:
                    group.pool.register(block_ids[index], block_hash, token_bytes)
        table.num_registered = num_full

    # -- recurrent state -----------------------------------------------------------------------------------------------

    def begin_plan(self) -> None:
        """Release the slots that the plan before this one held."""
        if self.slots is not None:
            self.slots.begin_plan()

    def plan_state(
        self, request: Request, table: BlockTable, start: int, num_tokens: int, has_forks: bool
    ) -> ChunkSlots:
        """Plan the slots of recurrent state that a chunk reads, writes and saves to."""
        state, end, num_prompt_tokens = table.state, start + num_tokens, request.num_prompt_tokens
        if self.slots is None or state is None:
            return NO_SLOTS
        plan = partial(self.slots.plan_chunk, state, end)
        reserve = self._num_free_seats
        if has_forks and start < num_prompt_tokens - 1 <= end:
            return plan(num_prompt_tokens - 1, is_held=True, reserve=reserve)
        if not has_forks and state.saved_at < num_prompt_tokens:
            self.slots.give_up_saved(state)
        if not self.enable_prefix_caching:
            return plan(None, is_held=False, reserve=reserve)
        if start >= num_prompt_tokens:
            is_saved = not has_forks and end % self.block_size == 0
            if is_saved:
                self._forget_saved(request, self.slots, state)
            # A slot per running request is left: unfinished answers must not crowd out useful snapshots.
            return plan(end if is_saved else None, is_held=True, reserve=max(reserve, len(self.tables)))
        last = (request.num_tokens - 1) // self.block_size * self.block_size
        save_at = next((each for each in (table.num_shared_tokens, last) if start < each <= end), None)
        return plan(save_at, is_held=False, reserve=reserve)

    @property
    def _num_free_seats(self) -> int:
        """Return the number of requests that may still be admitted: each will need a slot."""
        return self._max_num_seqs - len(self.tables)

    def _forget_saved(self, request: Request, slots: StateSlots, state: RequestState) -> None:
        """Give up the last snapshot of the answer: the next one, further on, takes its slot."""
        slots.give_up_saved(state)
        if request.num_prompt_tokens < state.saved_at <= request.num_tokens:
            slot = self.find(slots.pool, request, state.saved_at // self.block_size - 1)
            if slot is not None and not slots.pool.is_held(slot):
                slots.pool.forget(slot)

    def register_saved(self, request: Request, table: BlockTable) -> None:
        """Register the state after the request's computed tokens, if it was just saved; all tokens are known now."""
        state = table.state
        if self.slots is not None and state is not None and state.saved_at == table.num_computed_tokens:
            self.register_state(request, state.saved, state.saved_at)
            self.slots.give_up_saved(state)

    def register_state(self, request: Request, slot: int, num_tokens: int) -> None:
        """Register the state after `num_tokens` tokens, if they are whole blocks."""
        num_blocks, rest = divmod(num_tokens, self.block_size)
        if self.slots is not None and slot != NO_SLOT and not rest and self.enable_prefix_caching:
            index = num_blocks - 1
            self.slots.pool.register(slot, *self.content_of(request, index))

    def most_drafts(self) -> int:
        """Return the most drafts for whose states there are slots."""
        return sys.maxsize if self.slots is None else self.slots.pool.num_available - self._num_free_seats

    def plan_drafts(self, table: BlockTable, planned: ChunkSlots, num_drafts: int) -> ChunkSlots:
        """Plan the slots of recurrent state of a chunk that gets drafts, at most `most_drafts`."""
        if self.slots is None or table.state is None:
            return NO_SLOTS
        return self.slots.plan_drafts(table.state, planned, num_drafts)

    def settle_drafts(self, request: Request, table: BlockTable, num_right: int) -> None:
        """Let a request's state be the one after its last right draft: its computed tokens are known and counted."""
        state = table.state
        if self.slots is None or state is None:
            return
        state.num_tokens = table.num_computed_tokens
        num_behind = state.num_tokens % self.block_size
        is_saved = self.enable_prefix_caching and state.saved == NO_SLOT and num_behind <= num_right
        if is_saved:
            self._forget_saved(request, self.slots, state)
            state.saved_at = state.num_tokens - num_behind
            self.register_state(request, (*state.drafted, state.slot)[num_right - num_behind], state.saved_at)
        self.slots.settle_drafts(state, num_right, is_snapshot=is_saved and not num_behind)

    def close_table(self, request: Request) -> None:
        """Release the request's blocks; registered ones can still be found."""
        self._release(self.tables.pop(request.request_id))

    def _release(self, table: BlockTable) -> None:
        for group, block_ids in zip(self.groups, table.block_ids, strict=True):
            group.release(block_ids)
        if self.slots is not None and table.state is not None:
            self.slots.close(table.state)

    def fullest(self) -> BlockPool:
        """Return the pool with the largest share in use, which limits the requests that are admitted."""
        return max((group.pool for group in self.groups), key=lambda pool: pool.num_in_use / pool.num_blocks)

    def forget_all(self) -> bool:
        """Drop all cached content; return False, and drop nothing, while any block is in use."""
        self.begin_plan()
        pools = [group.pool for group in self.groups] + ([] if self.slots is None else [self.slots.pool])
        if any(pool.num_in_use for pool in pools):
            return False
        for pool in pools:
            pool.forget_all()
        return True

    # -- parked tables -------------------------------------------------------------------------------------------------

    def park(self, request: Request) -> None:
        """Keep the table of a request that has ended, in place of one kept under the same id."""
        self.close_parked(request.request_id)
        self.parked[request.request_id] = request, self.tables.pop(request.request_id)

    def close_parked(self, request_id: str) -> None:
        """Release the blocks that are parked under an id, if any."""
        if request_id in self.parked:
            _, table = self.parked.pop(request_id)
            self._release(table)

    def give_up_parked(self, spared: Collection[Request]) -> bool:
        """Close the oldest parked table of a request that is not spared; return False if there is none."""
        for request, _ in self.parked.values():
            if request not in spared:
                self.close_parked(request.request_id)
                return True
        return False

    def check(self, running: Mapping[Request, int], held: Callable[[int], list[list[int]]] = lambda _: []) -> None:
        """Assert the laws of pool and tables; `running` maps each running request to its tokens in flight.

        `held` returns the blocks of a holder, by its number, that are held for others.
        """
        assert self.tables.keys() == {request.request_id for request in running}, "tables and running differ"
        assert all(request.finish_reason for request, _ in self.parked.values()), "a live request is parked"
        owned = [(request, self.tables[request.request_id]) for request in running] + list(self.parked.values())
        for request, table in owned:
            num_full = table.num_computed_tokens // self.block_size
            assert len(table.block_ids[0]) >= self._num_blocks(table.num_computed_tokens), "computed beyond the table"
            # The last sampled token is not computed; a pooling request's tokens all are.
            was_pooled = request.pooling is not None and request.finish_reason is not None
            assert table.num_computed_tokens < request.num_tokens + was_pooled, "a request has nothing to compute"
            assert not self.enable_prefix_caching or table.num_registered >= num_full, "a full block is not registered"
        if self.slots is not None:
            states = [table.state for _, table in owned if table.state is not None]
            self.slots.check(states, held(len(self.groups)))
            assert all(table.state is not None for _, table in owned), "a request has no state"
        for number, group in enumerate(self.groups):
            tables = [(table.block_ids[number], table.num_trimmed[number]) for _, table in owned]
            group.check([*tables, *((block_ids, 0) for block_ids in held(number))])
            for request, num_in_flight in running.items():
                table = self.tables[request.request_id]
                num_planned = table.num_computed_tokens + num_in_flight
                assert table.num_trimmed[number] <= group.first_wanted(num_planned), "a block is given back too early"
                for block_id in table.block_ids[number][num_planned // self.block_size :]:
                    assert group.pool.is_private(block_id), f"block {block_id} will be written to and has two holders"

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _token_bytes(self, request: Request, index: int) -> bytes:
        start = index * self.block_size
        return request.token_ids[start : start + self.block_size].tobytes()

    def hash_of(self, request: Request, index: int) -> bytes:
        """Return the hash of the request's index-th block, extending its chain as far as needed."""
        hashes = request.block_hashes
        while len(hashes) <= index:
            # The number of an adapter means another one in another process, so its blocks begin with the pool's root.
            root = None if request.adapter is not None else self._root_hash
            parent = hashes[-1] if hashes else root
            # The salt enters with the first block; the chain carries it to all the others.
            salt = b"" if hashes else request.salt
            if request.media is not None:
                start = len(hashes) * self.block_size
                salt += block_media(request.media, start, start + self.block_size)
            hashes.append(self.groups[0].pool.hash_block(parent, self._token_bytes(request, len(hashes)), salt))
        return hashes[index]


def _longest(num_blocks: int, holders: Sequence[tuple[Holder, Callable[[int], int | None]]]) -> int:
    """Return the most leading blocks, up to num_blocks, after which all holders let a request continue.

    Each has the function that finds the block at an index.
    """
    before = -1
    while num_blocks != before:  # a holder may shorten the result of the one before it
        before = num_blocks
        for holder, find in holders:
            num_blocks = holder.longest(num_blocks, find)
    return num_blocks


def common_length(left: Sequence[int], right: Sequence[int], at_most: int) -> int:
    """Return the number of leading items in which two sequences of a kind agree, up to a limit."""
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
