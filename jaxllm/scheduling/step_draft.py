"""A step while it is being planned: what is in flight before it, what it may still take, and its rows so far."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping

import msgspec

from jaxllm.scheduling.kv_cache_manager import BlockTable
from jaxllm.scheduling.plan import Chunk, StepPlan
from jaxllm.scheduling.request import Request


class InFlight(msgspec.Struct, frozen=True, gc=False):
    """What the steps in flight hold of one request."""

    num_tokens: int = 0
    num_sampled: int = 0
    """Tokens being sampled that the host does not know yet."""
    row: int | None = None
    """The row of the latest step in flight that samples the request's last token, if there is one."""


NOTHING_IN_FLIGHT = InFlight()


def tally(steps: Iterable[tuple[StepPlan, list[Request]]]) -> dict[Request, InFlight]:
    """Sum the steps in flight, oldest first, by request; each plan comes with the requests of its rows."""
    total: dict[Request, InFlight] = {}
    for plan, requests in steps:
        # The device reads tokens of the step just before only: a row of an older one cannot be continued.
        total = {request: InFlight(ahead.num_tokens, ahead.num_sampled) for request, ahead in total.items()}
        for row, (chunk, request) in enumerate(zip(plan.chunks, requests, strict=True)):
            ahead = total.get(request, NOTHING_IN_FLIGHT)
            total[request] = InFlight(
                ahead.num_tokens + len(chunk.token_ids),
                ahead.num_sampled + chunk.samples,
                row if chunk.samples else None,
            )
    return total


class StepDraft:
    """Collect a step's chunks until its token budget is spent."""

    def __init__(self, budget: int, in_flight: Mapping[Request, InFlight]) -> None:
        self.budget = budget
        """Tokens that the step may still take."""
        self.in_flight = in_flight
        self.num_preempted = 0
        self._decodes: list[tuple[Request, Chunk]] = []
        self._longer: list[tuple[Request, Chunk]] = []

    def add(self, request: Request, table: BlockTable, start: int, num_tokens: int) -> None:
        """Plan num_tokens tokens of the request from position `start`, which its table covers."""
        ahead = self.in_flight.get(request, NOTHING_IN_FLIGHT)
        num_known = len(request.token_ids)
        is_known = start < num_known
        samples = start + num_tokens == num_known + ahead.num_sampled
        num_output_tokens = num_known - request.num_prompt_tokens + ahead.num_sampled
        params = request.params
        chunk = Chunk(
            request.request_id,
            start,
            request.token_ids[start : start + num_tokens] if is_known else array("i", (0,)),
            None if is_known else ahead.row,
            table.block_ids[:],
            samples,
            request.num_prompt_tokens,
            params,
            request.source.seed,
            num_output_tokens,
            request.banned_token_ids if samples and num_output_tokens < params.min_tokens else (),
        )
        (self._decodes if num_tokens == 1 else self._longer).append((request, chunk))
        self.budget -= num_tokens

    def finish(self, step_id: int) -> tuple[StepPlan, list[Request]] | None:
        """Return the plan and the requests of its rows, or None if it is empty."""
        rows = self._decodes + self._longer
        if not rows:
            return None
        plan = StepPlan(step_id, tuple([chunk for _, chunk in rows]), self.num_preempted)
        return plan, [request for request, _ in rows]
