"""The slots of recurrent state: one for each running request, and others with snapshots of prefixes.

A state is what layers without keys and values keep of all tokens so far, in one slot for all such layers. A snapshot is
a state that was saved after the last token of a block, for requests that begin with the same tokens; it is never
written again. Like a block's content, it lasts until its slot is taken by another.

A wrong draft would spoil a state, so a chunk with drafts keeps the states after all of its tokens, each in a slot that
it takes for this step. Once the host knows how many drafts were right, the slot after the last right one becomes the
request's own, and the others are given back: nothing is copied, and nothing is computed twice. Drafts that find no
slot are left out. The alternative, to start from the last certain state and compute the accepted tokens again, needs
two slots for any number of drafts, but costs rows of the whole model: for Qwen3.5-0.8B a row takes some thirty times as
long on a CPU as writing a state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import msgspec

from jaxllm.scheduling.cache.block_pool import NULL_BLOCK, BlockPool

NO_SLOT = NULL_BLOCK
"""The slot that stands for none: a request that begins reads none."""


@dataclass(slots=True)
class RequestState:
    """The state of one request."""

    slot: int
    """The slot that its steps, and no others, write to."""
    read: int
    """The slot that its next step reads: in the first step a snapshot's or none, then `slot`."""
    num_tokens: int
    """The number of tokens in its state once all planned steps have run."""
    saved: int = NO_SLOT
    """A slot that the request holds, with its state after `saved_at` tokens. It holds a state within the prompt until
    its forks have begun, and one within the answer until the host knows these tokens."""
    saved_at: int = 0
    drafted: tuple[int, ...] = ()
    """The slots that the request holds while a step with its drafts is in flight: with the states after the tokens of
    the chunk, except the last. Afterwards the snapshot that its next step reads, if that state is one."""


class ChunkSlots(msgspec.Struct, frozen=True, gc=False):
    """The slots of one chunk: the state is read before its first token and written after its last."""

    read: int
    write: int
    save: int = NO_SLOT
    """The slot that the state is also saved to, after the token before position `save_at`."""
    save_at: int = 0
    drafted: tuple[int, ...] = ()
    """In a chunk with drafts, the slots that keep the states after its tokens, except the last."""


NO_SLOTS = ChunkSlots(NO_SLOT, NO_SLOT)


class StateSlots:
    """Hand out slots, and find snapshots.

    In one plan no chunk writes to a slot that another reads or writes: all slots that a plan reads or saves to are held
    until the next plan.
    """

    def __init__(self, num_slots: int) -> None:
        """Have `num_slots` slots, including slot 0, which has no owner."""
        self.pool = BlockPool(num_slots)
        self._used: list[int] = []
        """The slots that are held for the latest plan, once for each use."""

    def begin_plan(self) -> None:
        """Release the slots that the plan before used: steps run in order, so that a later one may write to them."""
        for slot in self._used:
            self.pool.release([slot])
        self._used.clear()

    def fits(self, read: int) -> bool:
        """Return whether a request can have a slot of its own, besides the one that it reads first."""
        revived = read != NO_SLOT and not self.pool.is_held(read)
        return self.pool.num_available > revived

    def open(self, read: int, num_tokens: int) -> RequestState:
        """Give a request a slot of its own, which must fit; its first step reads `read`, `num_tokens` tokens' state."""
        if read != NO_SLOT:
            self._hold(read)
        [slot] = self.pool.take(1)
        return RequestState(slot, read, num_tokens)

    def plan_chunk(
        self, state: RequestState, end: int, save_at: int | None, *, is_held: bool, reserve: int
    ) -> ChunkSlots:
        """Plan a chunk up to position `end`, and save its state at a position if more than `reserve` slots are left.

        With `is_held` the request holds the snapshot until it gives it up; else others may find it at once.
        """
        read, state.read, state.num_tokens = state.read, state.slot, end
        self._used += state.drafted
        state.drafted = ()
        if save_at is None or self.pool.num_available <= reserve:
            return ChunkSlots(read, state.slot)
        [save] = self.pool.take(1)
        self._used.append(save)
        if is_held:
            self.pool.share([save])
            self.give_up_saved(state)
            state.saved, state.saved_at = save, save_at
        return ChunkSlots(read, state.slot, save, save_at)

    def plan_drafts(self, state: RequestState, planned: ChunkSlots, num_drafts: int) -> ChunkSlots:
        """Plan a chunk whose slots are planned with drafts too, for which there must be slots."""
        if planned.save != NO_SLOT:  # it is among the states that are kept
            self.give_up_saved(state)
        state.num_tokens += num_drafts
        state.drafted = tuple(self.pool.take(num_drafts))
        return ChunkSlots(planned.read, planned.write, drafted=state.drafted)

    def settle_drafts(self, state: RequestState, num_right: int, *, is_snapshot: bool) -> None:
        """Let the request go on from the state after its last right draft, and release the other slots.

        With `is_snapshot` others may find that state too: the request's next step reads it and writes elsewhere.
        """
        slots = [*state.drafted, state.slot]
        state.read = slots.pop(num_right)
        state.slot, state.drafted = (slots.pop(), (state.read,)) if is_snapshot else (state.read, ())
        self.pool.release(slots)

    def close(self, state: RequestState) -> None:
        """Release the request's slots."""
        self.give_up_saved(state)
        self.pool.release([state.slot, *state.drafted])
        state.drafted = ()

    def give_up_saved(self, state: RequestState) -> None:
        """Release the snapshot that the request holds, if any; others may find it if it is registered."""
        if state.saved != NO_SLOT:
            self.pool.release([state.saved])
            state.saved = NO_SLOT

    def longest(self, num_blocks: int, find: Callable[[int], int | None]) -> int:
        """Return the most leading blocks, up to num_blocks, after which there is a snapshot.

        `find` returns the slot of the state after the block at an index, if it can be found.
        """
        return next((place + 1 for place in range(num_blocks - 1, -1, -1) if find(place) is not None), 0)

    def _hold(self, slot: int) -> None:
        self.pool.share([slot])
        self._used.append(slot)

    def check(self, states: Iterable[RequestState], others: Iterable[Sequence[int]] = ()) -> None:
        """Assert that the pool agrees with the live requests' states, the latest plan, and others that hold slots."""
        held = [[slot for slot in (state.slot, state.saved, *state.drafted) if slot != NO_SLOT] for state in states]
        owned = [slots[0] for slots in held]
        assert len(owned) == len(set(owned)), "two requests write to one slot"
        self.pool.check([*held, self._used, *others])
