"""The requests that continue by one token a step, kept as columns from step to step.

Nearly all rows of nearly all steps belong to them, and differ from the step before in their positions alone. So they
have no records of their own: a step looks at those that end or need a block, and counts up the others.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple, Self

from jaxllm.scheduling.cache.kv_cache_manager import GroupBlocks, KVCacheManager
from jaxllm.scheduling.plan import NO_DECODES, Decodes, Owner, StepPlan
from jaxllm.scheduling.request import Request
from jaxllm.scheduling.request_queue import RequestQueue


class _Columns(NamedTuple):
    """An entry for each request. The lists are replaced, never changed: plans share them."""

    requests: list[Request]
    owners: list[Owner]
    block_ids: list[GroupBlocks]
    rows: list[int]
    """The row of the last step that samples the request's last token."""
    starts: list[int]
    """The position of that token."""
    pauses: list[int]
    """The first position of the next block, or that no token follows; sooner if it is not known yet."""

    def without(self, indices: Collection[int]) -> Self:
        """Return the entries but those of some indices."""
        if not indices:
            return self
        return self._replace(
            **{
                name: [each for index, each in enumerate(column) if index not in indices]
                for name, column in self._asdict().items()
            }
        )


_NO_COLUMNS = _Columns([], [], [], [], [], [])


class Continuing:
    """The requests whose last tokens are sampled by the last step, and that the next step may continue.

    What it keeps of a request follows from the request itself and from its block table. One that waits for its last
    token, or has media, is never among them.
    """

    def __init__(self, cache: KVCacheManager, waiting: RequestQueue) -> None:
        self._cache, self._waiting = cache, waiting
        self._step_id, self._columns = -1, _NO_COLUMNS

    def follow(self, plan: StepPlan, requests: list[Request]) -> None:
        """Take the rows of a step that has just been planned, with their requests.

        Its decodes are what `advance` has returned.
        """
        first = len(plan.decodes.starts)
        columns = self._columns if first else _NO_COLUMNS
        joining = [
            (request, chunk.owner, chunk.block_ids, row, chunk.start + len(chunk.token_ids), 0)
            for row, (chunk, request) in enumerate(zip(plan.others, requests[first:], strict=True), start=first)
            if chunk.samples and not chunk.num_drafts and request.is_plain
        ]
        columns = columns._replace(rows=list(range(first)), starts=[start + 1 for start in columns.starts])
        if joining:
            columns = _Columns(*([*old, *new] for old, new in zip(columns, zip(*joining, strict=True), strict=True)))
        self._step_id, self._columns = plan.step_id, columns

    def advance(
        self, step_id: int, late: Collection[str], *, are_known: bool, num_running: int, num_tokens: int
    ) -> tuple[Decodes, list[Request]]:
        """Return the rows of the step after `step_id`, with blocks for their tokens, and their requests.

        `are_known` says that `step_id` is committed. Requests in `late` are left out. There are no rows at all if the
        blocks may not suffice for these and the others of `num_running` requests, in a step of `num_tokens` tokens.
        """
        columns, self._columns = self._columns if step_id == self._step_id else _NO_COLUMNS, _NO_COLUMNS
        paused = [
            index
            for index, (request, start, pause) in enumerate(
                zip(columns.requests, columns.starts, columns.pauses, strict=True)
            )
            if start >= pause or request.row_step != step_id or (late and request.request_id in late)
        ]
        stopped = {index for index in paused if self._stops(columns, index, step_id, late)}
        num_blocks, num_others = len(paused) - len(stopped), num_running - len(columns.starts) + len(stopped)
        if num_others:
            num_blocks += num_others - (-num_tokens // self._cache.block_size)
        if any(group.pool.num_available < num_blocks for group in self._cache.groups):
            return NO_DECODES, []
        self._columns = columns = self._grown(columns, [i for i in paused if i not in stopped]).without(stopped)
        token_ids = [request.token_ids[-1] for request in columns.requests] if are_known else []
        rows = [] if are_known else columns.rows
        ends = zip(columns.starts, columns.pauses, strict=True)
        events = [row for row, (start, pause) in enumerate(ends) if start + 1 >= pause]
        return Decodes(columns.owners, columns.starts, token_ids, rows, columns.block_ids, events), columns.requests

    def _stops(self, columns: _Columns, index: int, step_id: int, late: Collection[str]) -> bool:
        """Return whether a request has ended, is preempted or late, or gets its last token in the step in flight."""
        request = columns.requests[index]
        is_over = request.row_step != step_id or request.request_id in late
        return is_over or columns.starts[index] + 1 >= request.most_tokens

    def _grown(self, columns: _Columns, indices: Collection[int]) -> _Columns:
        """Return the columns after the tables of some requests have grown."""
        if not indices:
            return columns
        block_ids, pauses, cache = columns.block_ids[:], columns.pauses[:], self._cache
        for index in indices:
            request, start = columns.requests[index], columns.starts[index]
            table = cache.tables[request.request_id]
            if cache.is_bounded and not self._waiting.num_forks(request):
                cache.trim(table, start)
            has_grown = cache.grow(table, start + 1)
            assert has_grown, "blocks were counted wrong"
            block_ids[index] = table.shown()
            pauses[index] = min(start - start % cache.block_size + cache.block_size, request.most_tokens - 1)
        return columns._replace(block_ids=block_ids, pauses=pauses)
