"""Build a step's plan: the steps in flight before it, the tokens and rows that it may still take, and its chunks."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from typing import NamedTuple

import msgspec

from jaxllm.core_messages import PromptMedia
from jaxllm.scheduling.adapter_slots import AdapterSlots
from jaxllm.scheduling.cache.kv_cache_manager import BlockTable, GroupBlocks
from jaxllm.scheduling.cache.state_slots import ChunkSlots
from jaxllm.scheduling.clips import ClipCache
from jaxllm.scheduling.config import SchedulerConfig
from jaxllm.scheduling.media import ChunkMedia, MediaCache, span_end
from jaxllm.scheduling.plan import NO_DECODES, NO_IDS, UNKNOWN, Chunk, Decodes, Owner, StepKind, StepPlan
from jaxllm.scheduling.request import Request


class InFlight(NamedTuple):
    """The part of one request that the steps in flight hold."""

    num_tokens: int = 0
    num_sampled: int = 0
    """Tokens being sampled that the host does not know yet."""
    row: int | None = None
    """The row of the latest step in flight that samples the request's last token, if that row is known."""


NOTHING_IN_FLIGHT = InFlight()


class Drafts(NamedTuple):
    """The drafts that a chunk gets, and the blocks and slots of the chunk with them."""

    token_ids: array[int]
    block_ids: GroupBlocks
    state_slots: ChunkSlots


type _Rare = tuple[array[int] | None, int, ChunkMedia | None, array[int]]
"""What few chunks have: `history`, `score_start`, `media` and `scored_ids`."""
_NOTHING_RARE: _Rare = (None, 0, None, NO_IDS)
_MOST_PASSED = 256
"""The most waiting requests that may be passed over in one step: looking at all of a long queue takes time."""


def tally(steps: Iterable[tuple[StepPlan, list[Request]]]) -> dict[Request, InFlight]:
    """Sum the steps in flight, oldest first, by request; each plan comes with the requests of its rows."""
    total: dict[Request, InFlight] = {}
    for plan, requests in steps:
        # The device only reads tokens of the step just before: a row of an older one cannot be continued.
        total = {request: InFlight(ahead.num_tokens, ahead.num_sampled) for request, ahead in total.items()}
        for row, (chunk, request) in enumerate(zip(plan.chunks, requests, strict=True)):
            ahead = total.get(request, NOTHING_IN_FLIGHT)
            total[request] = InFlight(
                ahead.num_tokens + len(chunk.token_ids),
                ahead.num_sampled + chunk.samples,
                row if chunk.samples and not chunk.num_drafts else None,
            )
    return total


class StepBuilder:
    """Collect a step's chunks until its tokens or its rows of logits are spent."""

    def __init__(
        self,
        config: SchedulerConfig,
        kind: StepKind,
        adapters: AdapterSlots,
        media: MediaCache,
        clips: ClipCache,
        most_prompt_tokens: int | None = None,
    ) -> None:
        """Begin a step; its chunks of prompts may have `most_prompt_tokens` tokens together, all of it if None."""
        self.kind = kind
        self._num_passed = 0
        self._most_tokens = self.num_tokens = config.max_num_batched_tokens
        """Tokens that the step may still take, if their rows have room."""
        self._most_prompt_tokens = self.num_tokens if most_prompt_tokens is None else most_prompt_tokens
        self.num_prompt_tokens = self._most_prompt_tokens
        """Tokens of prompts that the step may still take, if there is room."""
        self._alignment = config.row_alignment
        self._row_room = self._aligned(self.num_tokens)
        """Rows of tokens that are left besides the longer chunks; decodes take some of them too."""
        self.num_rows = config.num_rows
        """Rows of logits that the step may still take."""
        self.num_preempted = 0
        self._copies: tuple[dict[int, int], ...] = tuple({} for _ in config.groups)
        """In each cache group the source block of each target block."""
        self.donors: dict[Request, None] = {}
        """Donors of the forks that this step admits, in order. Their blocks stay until it is planned: a block that is
        copied must not become the target of another copy."""
        self._threshold = config.long_prefill_token_threshold or config.max_num_batched_tokens
        self._attention_chunks = config.attention_chunks
        self._cuts_prompts = config.enable_chunked_prefill
        self._adapters, self._media, self._clips = adapters, media, clips
        media.begin_step(config.max_num_batched_tokens)
        clips.begin_step(config.max_num_batched_tokens)
        self._continued: list[Request] = []
        self._continued_rows = NO_DECODES
        self._decodes: list[tuple[Request, Chunk]] = []
        self._longer: list[tuple[Request, Chunk]] = []

    @property
    def is_spent(self) -> bool:
        # The room is a multiple of the alignment, and so has room for one more row if it is larger.
        return not (self.num_tokens and self.num_rows and self._num_decodes < self._row_room)

    @property
    def has_begun(self) -> bool:
        """Return whether `begin_with` has given the step rows."""
        return bool(self._continued)

    @property
    def _num_decodes(self) -> int:
        return len(self._continued) + len(self._decodes)

    @property
    def num_planned(self) -> int:
        """Return the number of tokens in the step."""
        return self._most_tokens - self.num_tokens

    def _aligned(self, num_rows: int) -> int:
        return -(-num_rows // self._alignment) * self._alignment

    def may_pass(self) -> bool:
        """Return whether one more waiting request may be passed over, and count it."""
        self._num_passed += 1
        return self._num_passed <= _MOST_PASSED

    def room(self, num_behind: int = 0, *, is_whole: bool = False) -> int:
        """Return the most tokens that the next chunk may have, with a token kept back for each request behind.

        What `is_whole` may have as much of prompts as the step holds, if no other prompt has a part in it.
        """
        rows = self._row_room - self._aligned(self._num_decodes + num_behind)
        room = max(1, min(self.num_tokens - num_behind, rows))
        is_free = is_whole and self.num_prompt_tokens == self._most_prompt_tokens
        return room if is_free else min(room, self.num_prompt_tokens)

    def limit(
        self,
        request: Request,
        start: int,
        num_missing: int,
        num_shared: int,
        num_behind: int = 0,
        at_most: int | None = None,
    ) -> int:
        """Return the number of a request's missing tokens that the step may take; 0 if its rows or media do not fit.

        It is `at_most` that many, unless prompts are not cut or the tokens must be computed at once.

        A token and a row are kept back for each request behind, as long as this one gets at least a token. If layers
        attend within chunks of positions, the tokens are of one such chunk. Other requests begin with the
        `num_shared` leading tokens: a chunk ends after them, so that the state there can be saved.
        """
        media = request.media if request.reads_media(start) else None
        if request.runs_whole:
            fits = num_missing <= self.room(num_behind, is_whole=True)
            fits = fits and (media is None or self._limit_media(request, media, start, num_missing) == num_missing)
            return num_missing if fits else 0
        num_tokens = self._limit_tokens(request, start, num_missing, num_behind, is_whole=not self._cuts_prompts)
        if at_most is not None and self._cuts_prompts:
            num_tokens = min(num_tokens, at_most)
        if not num_tokens:
            return 0
        if self._cuts_prompts and start < num_shared < start + num_tokens:
            num_tokens = num_shared - start
        if media is None:
            return num_tokens
        if num_allowed := self._limit_media(request, media, start, num_tokens):
            return num_allowed
        # A span that must be whole takes what is kept back for requests behind, and is not cut for a state.
        num_whole = span_end(media, start) - start
        is_possible = (
            num_tokens < num_whole <= self._limit_tokens(request, start, num_missing, num_behind=0, is_whole=True)
        )
        return self._limit_media(request, media, start, num_whole) if is_possible else 0

    def _limit_tokens(self, request: Request, start: int, num_missing: int, num_behind: int, *, is_whole: bool) -> int:
        """Return the number of missing tokens that the step may take whatever media and others' states need."""
        room = 1 if num_missing == 1 else self.room(num_behind, is_whole=is_whole)
        num_tokens = min(num_missing, self._threshold, room)
        for size in self._attention_chunks:
            num_tokens = min(num_tokens, size - start % size)
        scored = request.scored_positions(start, num_tokens)
        num_free = self.num_rows - 1
        num_scored = max(min(1, num_free), num_free - num_behind)
        # The token before a position predicts it: stop before the one that predicts the first position too many.
        return num_tokens if len(scored) <= num_scored else scored[num_scored] - 1 - start

    def _limit_media(self, request: Request, media: PromptMedia, start: int, num_tokens: int) -> int:
        return self._media.limit(request.request_id, media, start, num_tokens)

    def begin_with(self, decodes: Decodes, requests: list[Request]) -> None:
        """Make decodes the first rows of the step, which is still empty."""
        self._continued_rows, self._continued = decodes, requests
        self.num_tokens -= len(requests)
        self.num_rows -= len(requests)

    def others(self, requests: list[Request]) -> list[Request]:
        """Return the requests that the step has not begun with."""
        if len(self._continued) == len(requests):
            return []
        members = set(self._continued)
        return [request for request in requests if request not in members] if members else requests

    def add(
        self,
        request: Request,
        table: BlockTable,
        start: int,
        num_tokens: int,
        state_slots: ChunkSlots,
        *,
        is_admitted: bool = False,
    ) -> None:
        """Add num_tokens tokens of the request, which may be just admitted, from position `start` on."""
        num_known = len(request.token_ids)
        end, num_all = start + num_tokens, num_known + request.num_unknown
        samples, num_outputs = self.kind is StepKind.SAMPLE and end == num_all, num_all - request.num_prompt_tokens
        owner, block_ids = request.owner, table.shown()
        assert owner is not None, "the request does not run"
        is_known = start < num_known
        token_ids, row = (request.token_ids[start:end], None) if is_known else (UNKNOWN, request.row)
        if is_known or request.media is not None:
            rare = self._rare(request, owner, start, num_tokens, is_admitted)
        else:
            rare = _NOTHING_RARE
        chunk = Chunk(owner, start, token_ids, row, block_ids, samples, num_outputs, state_slots, 0, *rare)
        if num_tokens == 1:
            self._decodes.append((request, chunk))
        else:
            self._longer.append((request, chunk))
            self._row_room -= self._aligned(num_tokens)
            self.num_prompt_tokens = max(0, self.num_prompt_tokens - num_tokens)
        self.num_tokens -= num_tokens
        self.num_rows -= 1

    def _rare(self, request: Request, owner: Owner, start: int, num_tokens: int, is_admitted: bool) -> _Rare:
        """Return what few chunks have."""
        history = request.token_ids[:] if is_admitted and owner.count_row is not None else None
        score_start, scored_ids = 0, NO_IDS
        if request.is_scored:
            scored = request.scored_positions(start, num_tokens)
            score_start, scored_ids = scored.start, request.token_ids[scored.start : scored.stop]
            self.num_rows -= len(scored)
        media = None if request.media is None else self._take_media(request, request.media, start, num_tokens)
        return history, score_start, media, scored_ids

    def _take_media(self, request: Request, media: PromptMedia, start: int, num_tokens: int) -> ChunkMedia:
        """Hold what the chunk's tokens need, and return what they take."""
        if request.reads_media(start):
            self._media.take(request.request_id, media, start, num_tokens)
        return self._media.chunk(media, start, num_tokens, request.num_prompt_tokens)

    def add_drafts(self, drafts_of: Callable[[Request, Chunk, int], Drafts | None]) -> None:
        """Give the chunks of one token the drafts that `drafts_of` returns for them.

        Its last argument is the most drafts that a chunk may have: they take what all chunks have left of the step, and
        beside prompts what these leave of their tokens.
        """
        decodes, self._decodes = self._decodes, []
        has_prompts = self.num_prompt_tokens < self._most_prompt_tokens
        num_left = self.num_prompt_tokens if has_prompts else self.num_tokens
        for index, (request, chunk) in enumerate(decodes):
            num_others = len(self._decodes) + len(decodes) - index - 1
            rows = (self._row_room - self._aligned(num_others)) // self._alignment * self._alignment
            at_most = min(num_left, self.num_tokens, self.num_rows, rows - 1)
            at_most = min([at_most, *(size - chunk.start % size - 1 for size in self._attention_chunks)])
            drafts = drafts_of(request, chunk, at_most) if at_most > 0 else None
            if drafts is None:
                self._decodes.append((request, chunk))
                continue
            num_drafts = len(drafts.token_ids)
            longer = msgspec.structs.replace(
                chunk,
                token_ids=chunk.token_ids + drafts.token_ids,
                block_ids=drafts.block_ids,
                state_slots=drafts.state_slots,
                num_drafts=num_drafts,
                num_output_tokens=chunk.num_output_tokens + num_drafts,
            )
            self._longer.append((request, longer))
            self._row_room -= self._aligned(1 + num_drafts)
            self.num_tokens -= num_drafts
            num_left -= num_drafts
            self.num_rows -= num_drafts

    def copy(self, group: int, source: int, target: int) -> None:
        """Copy a block of a cache group before the step runs."""
        # The donor itself may have been admitted in this step: then its block will be a copy of the same tokens.
        copies = self._copies[group]
        copies[target] = copies.get(source, source)

    def finish(self, step_id: int) -> tuple[StepPlan, list[Request]] | None:
        """Return the plan and the requests of its rows, or None if it is empty."""
        rows = self._decodes + self._longer
        if not rows and not self._continued:
            return None
        chunks = tuple([chunk for _, chunk in rows])
        copies = tuple([tuple([(source, target) for target, source in each.items()]) for each in self._copies])
        adapter_loads = self._adapters.take_loads(), self._adapters.is_used
        encodes, decodes, clips = self._media.end_step(), self._continued_rows, self._clips.end_step()
        plan = StepPlan(step_id, chunks, self.num_preempted, self.kind, copies, *adapter_loads, encodes, decodes, clips)
        return plan, [*self._continued, *[request for request, _ in rows]]
