"""Plan the steps of a draft model, which reads the tokens of running requests and guesses the next ones.

Its keys and values lie in a pool of its own, in blocks with the same ids as the model's: both share one block table,
with everything that the prefix cache or a donor contributes. It reads a request's tokens only once guesses are wanted,
up to a step's worth before each of the model's steps. Nothing that it computes reaches an answer: wrong keys and values
make guesses worse, and change no token.

A draft head is a draft model that reads the model's features of each position, and the token after it: of n tokens it
reads n - 1 positions. What it computes for guesses, without features, is computed again once they are certain.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache

from jaxllm.sampling_params import SamplingParams
from jaxllm.scheduling.cache.kv_cache_manager import BlockTable, GroupBlocks, KVCacheManager
from jaxllm.scheduling.plan import Chunk, Owner, StepPlan
from jaxllm.scheduling.request import Request
from jaxllm.speculation.drafter import DraftModelLimits


@dataclass(frozen=True, slots=True)
class DraftPlan:
    """Steps of a draft model, to be run in order."""

    steps: tuple[StepPlan, ...]
    """The first step computes the unread tokens, and guesses the next one; each later step reads the guesses of the
    step before, on the device."""
    requests: tuple[tuple[Request, ...], ...]
    """The requests of each step's rows."""


type _Wanted = tuple[Request, Chunk, int]
"""A request, its chunk in the first step, and the number of guesses that are wanted after it."""


@dataclass(slots=True)
class _Shared:
    """What the chunks of a request have in common, which a runner recognizes by identity."""

    owner: Owner
    block_ids: GroupBlocks = ()
    """The blocks of the last chunk."""


class DraftSteps:
    """Plan the steps of a draft model, and track how far it has read each request."""

    def __init__(self, limits: DraftModelLimits, cache: KVCacheManager) -> None:
        self._limits, self._cache = limits, cache
        self._read: dict[int, bytes] = {}
        """The hash of the full block that the draft model has read into each block id."""
        self._shared: dict[Request, _Shared] = {}
        """By request, from its first chunk until it ends."""

    def plan(self, wanted: Sequence[tuple[Request, int]]) -> DraftPlan | None:
        """Plan the steps that make the wanted numbers of guesses, one or more each; None if there are none.

        All lie within the draft model's context. A request with too many unread tokens gets no guesses yet.
        """
        rows = self._first_rows(wanted)
        if not rows:
            return None
        steps = [StepPlan(0, tuple([chunk for _, chunk, _ in rows]), 0)]
        requests = [tuple([request for request, _, _ in rows])]
        before = [(row, each) for row, each in enumerate(rows) if each[1].samples]
        while before := [(row, each) for row, each in before if each[2] > len(steps)]:
            chunks = [self._next_chunk(request, chunk, row, len(steps)) for row, (request, chunk, _) in before]
            steps.append(StepPlan(len(steps), tuple(chunks), 0))
            requests.append(tuple([request for _, (request, _, _) in before]))
            before = [(row, each) for row, (_, each) in enumerate(before)]
        return DraftPlan(tuple(steps), tuple(requests))

    def take(self, plan: DraftPlan, sampled: Sequence[Sequence[int]]) -> list[tuple[Request, array[int]]]:
        """Record that a plan has run, and return the guesses about each request. `sampled` has each step's tokens."""
        guesses: dict[Request, array[int]] = {request: array("i") for request in plan.requests[0]}
        for step, requests, token_ids in zip(plan.steps, plan.requests, sampled, strict=True):
            for chunk, request, token_id in zip(step.chunks, requests, token_ids, strict=True):
                table = self._cache.tables[request.request_id]
                table.num_drafted_tokens = chunk.start + len(chunk.token_ids)
                if chunk.samples:
                    guesses[request].append(token_id)
        for chunk, request in zip(plan.steps[0].chunks, plan.requests[0], strict=True):
            self._remember(request, chunk)
            if self._limits.shift:
                self._cache.tables[request.request_id].num_drafted_tokens = chunk.start + len(chunk.token_ids)
        return [(request, self._known(token_ids)) for request, token_ids in guesses.items() if token_ids]

    def drop_guesses(self, request: Request) -> None:
        """Mark guesses of a request as unread again: its certain tokens are those before its last one."""
        table = self._cache.tables[request.request_id]
        table.num_drafted_tokens = min(table.num_drafted_tokens, request.num_tokens - 1)

    def end(self, request: Request) -> None:
        """Forget what the chunks of a request that has ended had in common."""
        self._shared.pop(request, None)

    def check(self, requests: Collection[Request]) -> None:
        """Assert that nothing is kept but of these requests."""
        assert self._shared.keys() <= set(requests), "chunks of an ended request are kept"

    def _known(self, token_ids: array[int]) -> array[int]:
        """Return the leading tokens that are in the model's vocabulary."""
        end = next((at for at, token_id in enumerate(token_ids) if token_id >= self._limits.vocab_size), None)
        return token_ids[:end]

    def _first_rows(self, wanted: Sequence[tuple[Request, int]]) -> list[_Wanted]:
        """Return the first step's rows: requests with one unread token, then others, as far as there is room."""
        alignment = self._limits.row_alignment

        def aligned(num_rows: int) -> int:
            return -(-num_rows // alignment) * alignment

        num_left, decodes, longer = self._limits.max_num_batched_tokens, list[_Wanted](), list[_Wanted]()
        row_room = aligned(num_left)
        for request, count in wanted:
            table = self._cache.tables[request.request_id]
            # The last token is always read, since its successor is wanted, even if it was read before.
            table.num_drafted_tokens = min(table.num_drafted_tokens, self._num_readable(request) - 1)
            is_decode = table.num_drafted_tokens == self._num_readable(request) - 1
            rows = (row_room - aligned(len(decodes) + is_decode)) // alignment * alignment
            room = min(num_left, rows + is_decode)
            # The last blocks are for tokens that are certain.
            spare = len(self._cache.tables)
            if room < 1 or not self._cache.grow(table, request.num_tokens + count, spare):
                continue
            chunk = self._first_chunk(request, table, room)
            num_tokens = len(chunk.token_ids)
            num_left -= num_tokens
            if num_tokens == 1:
                decodes.append((request, chunk, count))
            else:
                longer.append((request, chunk, count))
                row_room -= aligned(num_tokens)
        return decodes + longer

    def _first_chunk(self, request: Request, table: BlockTable, most: int) -> Chunk:
        """Return a chunk of at most `most` of the tokens that the draft model has not read."""
        if not table.num_drafted_tokens:
            table.num_drafted_tokens = self._find_read(request, table)
        start, shift = table.num_drafted_tokens, self._limits.shift
        end = min(start + most, self._num_readable(request))
        token_ids = request.token_ids[start + shift : end + shift]
        return self._chunk(request, table, start, token_ids, samples=end == self._num_readable(request))

    def _num_readable(self, request: Request) -> int:
        """Return the number of positions of a request that the draft model can read."""
        return request.num_tokens - self._limits.shift

    def _next_chunk(self, request: Request, first: Chunk, row: int, number: int) -> Chunk:
        """Return step `number`'s chunk: the token that row `row` of the step before samples."""
        start = first.start + len(first.token_ids) + number - 1
        table = self._cache.tables[request.request_id]
        return self._chunk(request, table, start, array("i", (0,)), samples=True, previous_row=row)

    def _chunk(
        self,
        request: Request,
        table: BlockTable,
        start: int,
        token_ids: array[int],
        *,
        samples: bool,
        previous_row: int | None = None,
    ) -> Chunk:
        num_blocks = -(-(start + len(token_ids)) // self._cache.block_size)
        shared = self._shared.get(request)
        if shared is None:
            shared = self._shared[request] = _Shared(_owner(request))
        block_ids = (self._block_ids(table)[:num_blocks],) * self._limits.num_groups
        if shared.block_ids != block_ids:
            shared.block_ids = block_ids
        return Chunk(
            owner=shared.owner,
            start=start,
            token_ids=token_ids,
            previous_row=previous_row,
            block_ids=shared.block_ids,
            samples=samples,
            num_output_tokens=0,
        )

    def _block_ids(self, table: BlockTable) -> array[int]:
        return table.block_ids[self._limits.group]

    def _find_read(self, request: Request, table: BlockTable) -> int:
        """Return the leading tokens in full blocks that the draft model has read, for this request or another."""
        if not self._cache.enable_prefix_caching:
            return 0  # no other request has the same blocks
        # A draft head has read one more token, which may differ here: one wrong key among many.
        most, block_ids = (self._num_readable(request) - 1) // self._cache.block_size, self._block_ids(table)
        num_read = 0
        while num_read < most and self._read.get(block_ids[num_read]) == self._cache.hash_of(request, num_read):
            num_read += 1
        return num_read * self._cache.block_size

    def _remember(self, request: Request, chunk: Chunk) -> None:
        """Record the blocks that were written, and those full of certain tokens: up to the end of a first chunk."""
        if not self._cache.enable_prefix_caching:
            return
        table, block_size = self._cache.tables[request.request_id], self._cache.block_size
        block_ids = self._block_ids(table)
        for block_id in block_ids[chunk.start // block_size : -(-table.num_drafted_tokens // block_size)]:
            self._read.pop(block_id, None)
        index = (chunk.start + len(chunk.token_ids)) // block_size - 1
        while index >= 0 and block_ids[index] not in self._read:
            self._read[block_ids[index]] = self._cache.hash_of(request, index)
            index -= 1


@lru_cache(maxsize=256)
def _at_temperature(temperature: float) -> SamplingParams:
    """Return params with only a temperature, which the plain program supports."""
    return SamplingParams(temperature=temperature)


def _owner(request: Request) -> Owner:
    """Return what the draft model samples a request's guesses with."""
    # The same seed at the same position draws the same noise: if the two models agree on the probabilities, they draw
    # the same token.
    return Owner(
        request_id=request.request_id,
        num_prompt_tokens=request.num_prompt_tokens,
        params=_at_temperature(request.params.temperature),
        seed=request.source.seed,
    )
