"""Blocks that outlive the device's pools: evicted ones go to the host, and come back when a request wants them.

The scheduler decides which blocks move. `Moves` is what it asks for, and whoever runs the moves says when they have
ended. A block is saved when the pool gives it to another: its copy is launched before the step that overwrites it. A
waiting request whose beginning goes on in the host's memory takes blocks of the device, and waits while they are
filled; then they are registered in the prefix cache, where the request finds them as any other would.

A *holder* is a cache group, by its number, or the last one, the slots of recurrent state. The host has slots for each.
A slot is held while a save or a fetch uses it; the others wait in LRU order.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import NamedTuple

from jaxllm.scheduling.cache.block_pool import BlockPool
from jaxllm.scheduling.cache.kv_cache_manager import KVCacheManager, PrefixHit
from jaxllm.scheduling.request import Request


class Save(NamedTuple):
    """A block of a holder to copy to a slot of the host."""

    holder: int
    block_id: int
    slot: int


class Load(NamedTuple):
    """A block of a holder to fill from a slot of the host."""

    holder: int
    slot: int
    block_id: int


@dataclass(slots=True)
class Moves:
    """What to move before the next step. Saves come first: a fetch may fill a block that is saved."""

    saves: list[Save] = field(default_factory=list)
    fetches: dict[int, list[Load]] = field(default_factory=dict)
    """The loads of each fetch, by its number."""
    given_up: list[int] = field(default_factory=list)
    """The numbers of fetches whose blocks must not be filled any more."""

    def __bool__(self) -> bool:
        return bool(self.saves or self.fetches or self.given_up)


class _Wanted(NamedTuple):
    """A block of a request's beginning: its position among the request's blocks, and its id, None if missing."""

    holder: int
    position: int
    block_id: int | None


@dataclass(slots=True)
class _Pending:
    """A fetch for a waiting request: under way, or ended, with its blocks held until the request begins."""

    number: int
    held: list[list[int]]
    """The blocks that are held, for each holder: those that come, and others of the request's beginning."""
    coming: list[tuple[Load, int]]
    """The loads, with the index of each block in the request; none once they have ended."""


class Tiers:
    """Keep what the device's pools evict, and bring it back for waiting requests."""

    def __init__(self, cache: KVCacheManager, num_slots: Sequence[int]) -> None:
        """Keep up to `num_slots[n]` blocks of holder n of `cache`; none if it is empty. Slots count from 1."""
        self._cache = cache
        self._hosts = [BlockPool(1 + number) for number in num_slots]
        self._saving: dict[tuple[int, int], tuple[bytes, bytes]] = {}
        """The content that is on its way to each slot, by holder and slot."""
        self._pending: dict[Request, _Pending] = {}
        self._moves = Moves()
        self._num_fetches = 0
        self.num_saved_blocks = self.num_loaded_blocks = 0
        for number, holder in enumerate(cache.holders if self._hosts else ()):
            holder.pool.on_evicted = partial(self._save, number)

    @property
    def is_fetching(self) -> bool:
        """Return whether some request waits for blocks on their way."""
        return any(pending.coming for pending in self._pending.values())

    def take_moves(self) -> Moves:
        """Return the moves that were not returned before."""
        moves, self._moves = self._moves, Moves()
        return moves

    # -- to the host ---------------------------------------------------------------------------------------------------

    def _save(self, holder: int, block_id: int, block_hash: bytes, token_bytes: bytes) -> None:
        """Save a block that loses its content, unless the host has that already, or no slot is free."""
        host = self._hosts[holder]
        slot = host.find(block_hash, token_bytes)
        if slot is not None:
            host.share([slot])
            host.release([slot])  # now it is the one that was used last
        elif host.num_available:
            [slot] = host.take(1)
            self._saving[holder, slot] = block_hash, token_bytes
            self._moves.saves.append(Save(holder, block_id, slot))

    def end_save(self, save: Save, *, is_right: bool) -> None:
        """Make a saved block findable; if it could not be saved, give its slot back."""
        host, content = self._hosts[save.holder], self._saving.pop((save.holder, save.slot))
        if is_right and content != _FORGOTTEN:
            host.register(save.slot, *content)
            self.num_saved_blocks += 1
        host.release([save.slot])

    # -- back to the device --------------------------------------------------------------------------------------------

    def must_wait(self, request: Request) -> bool:
        """Return whether a request's blocks are on their way."""
        pending = self._pending.get(request)
        return pending is not None and bool(pending.coming)

    def fetch(self, request: Request, hit: PrefixHit) -> bool:
        """Begin to fetch what follows a waiting request's hit; return False if there is nothing, or no room."""
        cache = self._cache
        if not self._hosts or request in self._pending or not cache.looks_up(request):
            return False
        if not cache.fits(request.num_tokens, hit):
            return False
        num_blocks = cache.longest_in(request, self._hosts)
        if num_blocks * cache.block_size <= hit.num_tokens:
            return False
        wanted = [
            [_Wanted(number, index, cache.find(holder.pool, request, index)) for index in indices]
            for number, (holder, indices) in enumerate(zip(cache.holders, cache.indices_in(num_blocks), strict=True))
        ]
        if not all(self._fits(number, blocks) for number, blocks in enumerate(wanted)):
            return False
        # What is there is held before blocks are taken, which evicts others, from the device and from the host.
        held = [[each.block_id for each in blocks if each.block_id is not None] for blocks in wanted]
        for holder, block_ids in zip(cache.holders, held, strict=True):
            holder.pool.share(block_ids)
        missing = [each for each in chain(*wanted) if each.block_id is None]
        slots = [self._hold_slot(request, each) for each in missing]
        coming = []
        for (holder, position, _), slot in zip(missing, slots, strict=True):
            [block_id] = cache.holders[holder].pool.take(1)
            held[holder].append(block_id)
            coming.append((Load(holder, slot, block_id), position))
        self._num_fetches += 1
        self._pending[request] = _Pending(self._num_fetches, held, coming)
        self._moves.fetches[self._num_fetches] = [load for load, _ in coming]
        return True

    def _fits(self, holder: int, wanted: Sequence[_Wanted]) -> bool:
        """Return whether a holder has blocks for those that are missing, besides the others."""
        pool = self._cache.holders[holder].pool
        num_taken = sum(each.block_id is None or not pool.is_held(each.block_id) for each in wanted)
        return num_taken <= pool.num_available

    def _hold_slot(self, request: Request, wanted: _Wanted) -> int:
        host = self._hosts[wanted.holder]
        slot = self._cache.find(host, request, wanted.position)
        assert slot is not None, "what was found is gone"
        host.share([slot])
        return slot

    def end_fetch(self, number: int, *, is_right: bool) -> None:
        """Register the blocks of a fetch that has ended, or give them up. One that was given up before is ignored."""
        request = next((each for each, pending in self._pending.items() if pending.number == number), None)
        if request is None:
            return
        if not is_right:
            self.release(request)
            return
        coming, self._pending[request].coming = self._pending[request].coming, []
        for load, index in coming:
            self._cache.holders[load.holder].pool.register(load.block_id, *self._cache.content_of(request, index))
            self._hosts[load.holder].release([load.slot])
        self.num_loaded_blocks += len(coming)

    def release(self, request: Request) -> None:
        """Give up what is held for a request, if anything: it has begun or ended, or its fetch has failed."""
        pending = self._pending.pop(request, None)
        if pending is None:
            return
        if pending.coming:
            self._moves.given_up.append(pending.number)
            self._moves.fetches.pop(pending.number, None)
        for load, _ in pending.coming:
            self._hosts[load.holder].release([load.slot])
        for holder, block_ids in zip(self._cache.holders, pending.held, strict=True):
            holder.pool.release(block_ids)

    def give_up(self, spared: Collection[Request] = ()) -> bool:
        """Release the blocks of the request that got them last and is not spared; return False if there is none."""
        request = next((each for each in reversed(self._pending) if each not in spared), None)
        if request is not None:
            self.release(request)
        return request is not None

    def forget_all(self) -> None:
        """Forget what the host has, and what is on its way there."""
        self._saving = dict.fromkeys(self._saving, _FORGOTTEN)
        for host in self._hosts:
            host.forget_unheld()

    def held(self, holder: int) -> list[list[int]]:
        """Return the blocks of a holder that are held for waiting requests."""
        return [pending.held[holder] for pending in self._pending.values()]

    def check(self, waiting: Iterable[Request]) -> None:
        """Assert the laws of the host's slots."""
        assert self._pending.keys() <= set(waiting), "blocks are held for a request that does not wait"
        loads = [load for pending in self._pending.values() for load, _ in pending.coming]
        for number, host in enumerate(self._hosts):
            loading = [[load.slot] for load in loads if load.holder == number]
            host.check([*loading, [slot for holder, slot in self._saving if holder == number]])


_FORGOTTEN = b"", b""
"""The content of a save that is on its way and must not be found."""
