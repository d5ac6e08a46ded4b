"""The requests that continue by one token a step, kept as columns from step to step.

Nearly all rows of nearly all steps belong to them, and differ from the step before in their positions alone. So they
have no records of their own: a step looks at those that end or need a block, and counts up the others.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
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
    rows: Sequence[int]
    """The row of the last step that samples the request's last token."""
    starts: list[int]
    """The position of that token."""
    checks: list[int]
    """The position at which the request may need a block or give one back, or that no token follows."""

    def without(self, indices: Collection[int]) -> Self:
        """Return the columns without the entries at some indices."""
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

    Once a step, `advance` is called before other requests are planned, and `follow` afterwards. What is kept of a
    request follows from the request itself and from its block table. One that waits for its last token, or has media,
    is never among them.
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
            (request, chunk.owner, chunk.block_ids, row, end, self._check_at(request, end))
            for row, (chunk, request) in enumerate(zip(plan.others, requests[first:], strict=True), start=first)
            if chunk.samples
            and request.is_plain
            and (end := chunk.start + len(chunk.token_ids)) < request.most_tokens - 1
        ]
        columns = columns._replace(rows=range(first), starts=[start + 1 for start in columns.starts])
        if joining:
            columns = _Columns(*([*old, *new] for old, new in zip(columns, zip(*joining, strict=True), strict=True)))
        self._step_id, self._columns = plan.step_id, columns

    def forget(self) -> None:
        """Let the next step look at each request: its table may change meanwhile."""
        self._columns = _NO_COLUMNS

    def advance(
        self, step_id: int, late: Collection[str], *, are_known: bool, num_running: int, num_prompt_tokens: int
    ) -> tuple[Decodes, list[Request]]:
        """Return the rows of the step after `step_id`, with blocks for their tokens, and their requests.

        `are_known` says that `step_id` is committed. Requests in `late` are left out. There are no rows at all if the
        blocks may not suffice for the others of `num_running` requests too, which compute at most `num_prompt_tokens`
        tokens of prompts.
        """
        columns, self._columns = self._columns if step_id == self._step_id else _NO_COLUMNS, _NO_COLUMNS
        due = [
            index
            for index, (request, start, check) in enumerate(
                zip(columns.requests, columns.starts, columns.checks, strict=True)
            )
            if start >= check or request.row_step != step_id or (late and request.request_id in late)
        ]
        over = {index for index in due if self._is_over(columns, index, step_id, late)}
        num_others = num_running - len(columns.starts) + len(over)
        most_of_prompts = -(-num_prompt_tokens // self._cache.block_size)
        num_blocks = len(due) - len(over) + num_others + most_of_prompts
        if any(group.pool.num_available < num_blocks for group in self._cache.groups):
            return NO_DECODES, []
        grown = [index for index in due if index not in over]
        self._columns = columns = self._grown(columns, grown).without(over)
        token_ids = [request.token_ids[-1] for request in columns.requests] if are_known else []
        rows = [] if are_known else columns.rows
        ends = zip(columns.starts, columns.checks, strict=True)
        events = [row for row, (start, check) in enumerate(ends) if start + 1 >= check]
        decodes = Decodes(columns.owners, columns.starts, token_ids, rows, columns.block_ids, events, grown)
        return decodes, columns.requests

    def _is_over(self, columns: _Columns, index: int, step_id: int, late: Collection[str]) -> bool:
        """Return whether a request has ended, is preempted or late, or gets its last token in the step in flight."""
        request = columns.requests[index]
        is_over = request.row_step != step_id or request.request_id in late
        return is_over or columns.starts[index] + 1 >= request.most_tokens

    def _grown(self, columns: _Columns, indices: Collection[int]) -> _Columns:
        """Return the columns after the tables of some requests have grown."""
        if not indices:
            return columns
        block_ids, checks, cache = columns.block_ids[:], columns.checks[:], self._cache
        for index in indices:
            request, start = columns.requests[index], columns.starts[index]
            table = cache.tables[request.request_id]
            if cache.is_bounded and not self._waiting.num_forks(request):
                cache.trim(table, start)
            has_grown = cache.grow(table, start + 1)
            assert has_grown, "blocks were counted wrong"
            block_ids[index] = table.shown()
            checks[index] = self._check_at(request, start)
        return columns._replace(block_ids=block_ids, checks=checks)

    def _check_at(self, request: Request, start: int) -> int:
        """Return the entry of `checks` of a request whose next token is at `start`."""
        size, groups, table = self._cache.block_size, self._cache.groups, self._cache.tables[request.request_id]
        check = min(len(table.block_ids[0]) * size, (start // size + 1) * size, request.most_tokens - 1)
        if self._cache.is_bounded:
            for group, num_trimmed in zip(groups, table.num_trimmed, strict=True):
                check = min(check, start if group.first_wanted(start) > num_trimmed else group.next_trim(start))
        return check

    def check(self, step_id: int) -> None:
        """Assert that the columns say what the requests and their tables do; `step_id` is the last step."""
        if step_id != self._step_id:
            return
        for request, owner, block_ids, row, start, check in zip(*self._columns, strict=True):
            if request.row_step == step_id:
                table = self._cache.tables[request.request_id]
                assert owner is request.owner, "a row of an earlier run"
                assert block_ids is table.shown(), "the blocks have changed"
                assert row == request.row, "another row"
                assert start == table.num_computed_tokens + request.num_planned, "another position"
                assert start + 1 == request.num_tokens + request.num_unknown, "it lacks more than a token"
                assert check <= self._check_at(request, start), "an event is passed over"
