"""Blocks that outlive the device's pools: evicted ones go to the host, and come back when a request wants them.

The scheduler decides which blocks move. `Moves` is what it asks for, and whoever runs the moves says when they have
ended. A block is saved when the pool gives it to another: its copy is launched before the step that overwrites it. A
waiting request whose beginning goes on in the host's memory takes blocks of the device, and waits while they are
filled; then they are registered in the prefix cache, where the request finds them as any other would. It does so if
`FetchTimes` expects it to be sooner than computing. The same holds for a request that was preempted: its blocks went to
the prefix cache, and from there to the host when others took them.

A *holder* is a cache group, by its number, or the last one, the slots of recurrent state. The host has slots for each.
A slot is held while a save or a fetch uses it; the others wait in LRU order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from operator import attrgetter
from typing import NamedTuple, Protocol

from jaxllm.scheduling.cache.block_pool import BlockPool
from jaxllm.scheduling.cache.fetch_times import FetchTimes, Part, PartTime
from jaxllm.scheduling.cache.kv_cache_manager import KVCacheManager, PrefixHit
from jaxllm.scheduling.request import Request

type Content = tuple[bytes, bytes]
"""The hash of a block, and the bytes of its token ids."""


class Save(NamedTuple):
    """A block of a holder to copy to a slot of the host."""

    holder: int
    block_id: int
    slot: int
    content: Content


class Load(NamedTuple):
    """A block of a holder to fill from a slot of the host."""

    holder: int
    slot: int
    block_id: int
    content: Content
    is_in_file: bool
    """True if the slot is to be filled from a file first."""


class Files(Protocol):
    """The blocks that have been written to files."""

    def has(self, holder: int, block_hash: bytes) -> bool:
        """Return whether there is a file, as far as is known; it may turn out to be wrong."""
        ...

    def forget_all(self) -> None:
        """Forget and remove all files, and write none of what was to be saved before."""
        ...


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
    """A block of a request's beginning, and where it is: on the device, in a slot of the host, or in a file alone."""

    holder: int
    content: Content
    block_id: int | None
    slot: int | None


@dataclass(slots=True)
class TierCounts:
    """Counts since the engine's start."""

    num_queried_tokens: int = 0
    num_host_tokens: int = 0
    """Prompt tokens of requests that came from the host's memory."""
    num_disk_tokens: int = 0
    """Prompt tokens of blocks that came from files, in some holder."""
    num_host_blocks: int = 0
    """Blocks that came from the host's memory."""
    num_disk_blocks: int = 0
    num_evicted: int = 0
    """Blocks that the host's memory forgot for others."""
    num_fetches: int = 0
    num_failed: int = 0


@dataclass(slots=True)
class _Pending:
    """A fetch for a waiting request: under way, or ended, with its blocks held until the request begins."""

    number: int
    held: list[list[int]]
    """The blocks that are held, for each holder: those that come, and others of the request's beginning."""
    coming: list[Load]
    """What is on its way; nothing once it has ended."""
    num_host_tokens: int
    """The tokens that the request gains from the host's memory."""
    num_disk_tokens: int
    """The tokens that it gains from blocks in files, in some holder."""


class Tiers:
    """Keep what the device's pools evict, and bring it back for waiting requests."""

    def __init__(
        self,
        cache: KVCacheManager,
        num_slots: Sequence[int],
        times: FetchTimes,
        counts: TierCounts,
        files: Files | None = None,
    ) -> None:
        """Keep up to `num_slots[n]` blocks of holder n of `cache`; none if it is empty. Slots count from 1.

        `times` tells whether a fetch pays. `counts` go on from what they are. `files` are the blocks that are kept in
        files too.
        """
        self._cache, self.times, self._files = cache, times, files
        self.counts = counts
        self._hosts = [BlockPool(1 + number) for number in num_slots]
        self._saving: dict[tuple[int, int], bool] = {}
        """The slots, by holder, that content is on its way to; False if it must not be found any more."""
        self._pending: dict[Request, _Pending] = {}
        self._given_up: dict[int, list[Load]] = {}
        """The loads from files of fetches that were given up and have not ended: they may still fill their slots."""
        self._moves = Moves()
        self._num_fetches = 0
        for host in self._hosts:
            host.on_evicted = self._count_eviction
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
            self._saving[holder, slot] = True
            self._moves.saves.append(Save(holder, block_id, slot, (block_hash, token_bytes)))

    def save_all(self) -> None:
        """Save all that the devices hold for no request, as before a shutdown."""
        for number, holder in enumerate(self._cache.holders if self._hosts else ()):
            for block_id, content in holder.pool.unheld():
                self._save(number, block_id, *content)

    def end_save(self, save: Save, *, is_right: bool) -> None:
        """Make a saved block findable; if it could not be saved, give its slot back."""
        host, is_wanted = self._hosts[save.holder], self._saving.pop((save.holder, save.slot))
        if is_right and is_wanted:
            host.register(save.slot, *save.content)
        host.release([save.slot])

    # -- back to the device --------------------------------------------------------------------------------------------

    def late(self, others: Collection[str]) -> Collection[str]:
        """Return the ids of the requests whose blocks are on their way, and others."""
        ids = [request.request_id for request, pending in self._pending.items() if pending.coming]
        return {*others, *ids} if ids else others

    def fetch(self, request: Request, hit: PrefixHit) -> bool:
        """Begin to fetch what follows a waiting request's hit.

        Return False if there is nothing, or no room, or if computing is sooner.
        """
        cache = self._cache
        if not self._hosts or request in self._pending or not cache.looks_up(request):
            return False
        if not cache.fits(request.num_tokens, hit):
            return False
        wanted, num_gained = self._wanted(request, hit)
        if not num_gained:
            return False
        # What is there is held before anything is taken, which evicts others, from the device and from the host.
        held = [[each.block_id for each in blocks if each.block_id is not None] for blocks in wanted]
        for holder, block_ids in zip(cache.holders, held, strict=True):
            holder.pool.share(block_ids)
        missing = [each for each in chain(*wanted) if each.block_id is None]
        for holder, _, _, slot in missing:
            if slot is not None:
                self._hosts[holder].share([slot])
        # All slots are taken before any block: a block may lose its content to the host, which takes a slot too.
        slots = [self._hosts[each.holder].take(1)[0] if each.slot is None else each.slot for each in missing]
        coming = [self._take(each, slot) for each, slot in zip(missing, slots, strict=True)]
        for load in coming:
            held[load.holder].append(load.block_id)
        self._num_fetches += 1
        contents, in_files = {load.content for load in coming}, {load.content for load in coming if load.is_in_file}
        num_disk_tokens = num_gained * len(in_files) // len(contents)
        self._pending[request] = _Pending(
            self._num_fetches, held, coming, num_gained - num_disk_tokens, num_disk_tokens
        )
        self._moves.fetches[self._num_fetches] = list(coming)
        return True

    def _wanted(self, request: Request, hit: PrefixHit) -> tuple[list[list[_Wanted]], int]:
        """Return the blocks of each holder for the longest beginning of a request that the tiers have.

        The number is that of its tokens beyond a hit. If computing is sooner than files, or the host has no room for
        them, it is the longest beginning without them. Return no blocks and 0 if computing is sooner than that too, if
        the devices have no room, or if nothing is longer than the hit.
        """
        cache = self._cache
        for has in (self._has, self._has_in_slot):
            num_blocks = cache.longest_in(request, has)
            num_tokens = num_blocks * cache.block_size
            if num_tokens <= hit.num_tokens:
                break
            wanted = [
                [self._find(number, cache.content_of(request, index)) for index in indices]
                for number, indices in enumerate(cache.indices_in(num_blocks))
            ]
            missing = [each for each in chain(*wanted) if each.block_id is None]
            from_files = Counter(Part(each.holder, reads_files=True) for each in missing if each.slot is None)
            parts = from_files + Counter(Part(each.holder, reads_files=False) for each in missing)
            num_gained, num_left = num_tokens - hit.num_tokens, request.num_tokens - num_tokens
            fits = all(self._fits(number, blocks) for number, blocks in enumerate(wanted))
            if fits and self.times.pays(parts, num_gained, num_left):
                return wanted, num_gained
            if not from_files:
                break
        return [], 0

    def _has(self, holder: int, content: Content) -> bool:
        """Return whether the host has some content, in a slot or a file."""
        if self._has_in_slot(holder, content):
            return True
        return self._files is not None and self._files.has(holder, content[0])

    def _has_in_slot(self, holder: int, content: Content) -> bool:
        """Return whether the host has some content in its memory."""
        return self._hosts[holder].find(*content) is not None

    def _find(self, holder: int, content: Content) -> _Wanted:
        pool, host = self._cache.holders[holder].pool, self._hosts[holder]
        return _Wanted(holder, content, pool.find(*content), host.find(*content))

    def _fits(self, holder: int, wanted: Sequence[_Wanted]) -> bool:
        """Return whether a holder has blocks for those that are missing, besides the others, and the host slots."""
        pool, host = self._cache.holders[holder].pool, self._hosts[holder]
        num_taken = sum(each.block_id is None or not pool.is_held(each.block_id) for each in wanted)
        missing = [each for each in wanted if each.block_id is None]
        num_slots = sum(each.slot is None or not host.is_held(each.slot) for each in missing)
        return num_taken <= pool.num_available and num_slots <= host.num_available

    def _take(self, wanted: _Wanted, slot: int) -> Load:
        """Take a block for a missing one, which is to come by a slot."""
        [block_id] = self._cache.holders[wanted.holder].pool.take(1)
        return Load(wanted.holder, slot, block_id, wanted.content, is_in_file=wanted.slot is None)

    def end_fetch(self, number: int, *, is_right: bool, times: Sequence[PartTime] = ()) -> None:
        """Register the blocks of a fetch that has ended, or give them up; `times` are those of its parts that ended."""
        self.times.record(times)
        if number in self._given_up:
            self._release_slots(self._given_up.pop(number))
            return
        request = next(each for each, pending in self._pending.items() if pending.number == number)
        coming, self._pending[request].coming = self._pending[request].coming, []
        if not is_right:
            self.counts.num_failed += 1
            self._release_slots(coming)
            self.release(request)
            return
        for load in coming:
            self._cache.holders[load.holder].pool.register(load.block_id, *load.content)
            host = self._hosts[load.holder]
            if load.is_in_file:
                host.register(load.slot, *load.content)
            host.release([load.slot])
        self.counts.num_fetches += 1
        num_from_files = sum(load.is_in_file for load in coming)
        self.counts.num_disk_blocks += num_from_files
        self.counts.num_host_blocks += len(coming) - num_from_files

    def count_hit(self, request: Request, num_hit_tokens: int) -> int:
        """Count a looked up request that begins, with a hit; return the tokens of it that came from the tiers."""
        if not self._hosts:
            return 0
        pending, counts = self._pending.get(request), self.counts
        num_host, num_disk = (0, 0) if pending is None else (pending.num_host_tokens, pending.num_disk_tokens)
        counts.num_host_tokens += num_host
        counts.num_disk_tokens += num_disk
        counts.num_queried_tokens += request.num_prompt_tokens - num_hit_tokens + num_host + num_disk
        return num_host + num_disk

    def num_kept(self) -> list[int]:
        """Return the number of each holder's blocks that the host's memory has."""
        return [host.num_findable for host in self._hosts]

    def _count_eviction(self, *_: object) -> None:
        self.counts.num_evicted += 1

    def release(self, request: Request) -> None:
        """Give up what is held for a request, if anything: it has begun or ended, or its fetch has failed."""
        pending = self._pending.pop(request, None)
        if pending is None:
            return
        if pending.coming and self._moves.fetches.pop(pending.number, None) is None:
            self._moves.given_up.append(pending.number)
            self._given_up[pending.number] = [load for load in pending.coming if load.is_in_file]
            self._release_slots(load for load in pending.coming if not load.is_in_file)
        else:
            self._release_slots(pending.coming)
        for holder, block_ids in zip(self._cache.holders, pending.held, strict=True):
            holder.pool.release(block_ids)

    def _release_slots(self, loads: Iterable[Load]) -> None:
        for load in loads:
            self._hosts[load.holder].release([load.slot])

    def give_up(self, wanting: Request | None = None) -> bool:
        """Release the blocks of the last request in line that has some; return False if there is none.

        One that wants them gets no blocks of those before it, which would fetch them again at once.
        """
        last = max(self._pending, key=attrgetter("order"), default=None)
        if last is None or (wanting is not None and last.order <= wanting.order):
            return False
        self.release(last)
        return True

    def forget_all(self, *, with_files: bool = True) -> None:
        """Forget what the host has, and what is on its way there; files too unless told otherwise."""
        self._saving = dict.fromkeys(self._saving, False)
        for host in self._hosts:
            host.forget_unheld()
        if self._files is not None and with_files:
            self._files.forget_all()

    def leave_files(self) -> None:
        """Neither read, write nor remove files from now on: those that exist are of weights that have been replaced."""
        self._files = None

    def held(self, holder: int) -> list[list[int]]:
        """Return the blocks of a holder that are held for waiting requests."""
        return [pending.held[holder] for pending in self._pending.values()]

    def check(self, waiting: Iterable[Request]) -> None:
        """Assert the laws of the host's slots."""
        assert self._pending.keys() <= set(waiting), "blocks are held for a request that does not wait"
        loads = [load for pending in self._pending.values() for load in pending.coming]
        loads += chain(*self._given_up.values())
        for number, host in enumerate(self._hosts):
            loading = [[load.slot] for load in loads if load.holder == number]
            host.check([*loading, [slot for holder, slot in self._saving if holder == number]])
