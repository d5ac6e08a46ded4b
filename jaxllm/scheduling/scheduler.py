"""Which tokens run next. There is no prefill phase and no decode phase: a request has tokens, some of them computed,
and every step closes a part of the gap within one token budget. A new prompt, a chunk of a long one, a decode and the
return of a preempted request are all this one rule.

`plan` decides and may change the queues, the block tables and the pool. `commit` alone (and abort) changes a request's
tokens, its computed count and its end. So a step can be planned while the one before it still runs.
"""

from __future__ import annotations

import time
from bisect import insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter

from jaxllm.engine.messages import EngineCoreOutput, EngineCoreRequest, SchedulerStats, TokenLogprobs
from jaxllm.scheduling.config import SchedulerConfig
from jaxllm.scheduling.kv_cache_manager import BlockTable, KVCacheManager
from jaxllm.scheduling.plan import StepPlan, StepResult
from jaxllm.scheduling.request import Request, RequestStatus, find_end
from jaxllm.scheduling.request_queue import RequestQueue, order_of
from jaxllm.scheduling.step_draft import NOTHING_IN_FLIGHT, StepDraft, tally


@dataclass(slots=True)
class Counters:
    """Counts since the scheduler was made."""

    num_arrivals: int = 0
    num_steps: int = 0
    num_scheduled_tokens: int = 0
    num_preemptions: int = 0
    num_queried_tokens: int = 0
    num_hit_tokens: int = 0


class Scheduler:
    """Plan steps, commit their results, and end requests."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.cache = KVCacheManager(config.num_blocks, config.block_size, config.enable_prefix_caching)
        self._requests: dict[str, Request] = {}
        self._waiting = RequestQueue()
        self._running: list[Request] = []
        """Those with a block table, in the policy's order: the last one is preempted first."""
        self._in_flight: dict[int, list[Request]] = {}
        """Step id -> the requests of its rows, for the plans not committed yet, oldest first."""
        self._counters = Counters()

    # -- requests come and go ------------------------------------------------------------------------------------------

    def add_request(self, request: EngineCoreRequest) -> None:
        """Put a request in line; raise ValueError if its id is in use or its prompt cannot run."""
        if request.request_id in self._requests:
            raise ValueError(f"Request id {request.request_id!r} is in use: wait for it to end or choose another id.")
        if not 1 <= len(request.prompt_token_ids) <= self.config.max_model_len:
            raise ValueError(
                f"Request {request.request_id!r} has {len(request.prompt_token_ids)} prompt tokens; "
                f"max_model_len={self.config.max_model_len} allows 1 to that many."
            )
        order = order_of(request, self._counters.num_arrivals, self.config.policy)
        self._counters.num_arrivals += 1
        entry = Request(request, order, queued_ts=time.monotonic())
        self._requests[request.request_id] = entry
        self._waiting.push(entry)

    def abort_requests(self, request_ids: Iterable[str]) -> list[EngineCoreOutput]:
        """End requests and free their blocks at once, also with a step in flight; ignore ids that are unknown."""
        outputs = []
        for request_id in request_ids:
            request = self._requests.get(request_id)
            if request is None:
                continue
            if request in self._waiting:
                self._waiting.remove(request)
            else:
                self._running.remove(request)
                self.cache.close_table(request)
            self._end(request, "abort")
            outputs.append(_output(request, [], None, "abort", None))
        return outputs

    def abandon(self) -> list[EngineCoreOutput]:
        """End all requests, forget the steps in flight and all cached prefixes: what a failed step wrote is unknown."""
        outputs = self.abort_requests(list(self._requests))
        self._in_flight.clear()
        self.cache.pool.forget_all()
        return outputs

    def has_unfinished_requests(self) -> bool:
        return bool(self._requests)

    @property
    def num_unfinished_requests(self) -> int:
        return len(self._requests)

    def status_of(self, request_id: str) -> RequestStatus:
        """Say where a request stands; raise KeyError if it has ended or never came."""
        request = self._requests[request_id]
        if request not in self._waiting:
            return RequestStatus.RUNNING
        return RequestStatus.WAITING if request.scheduled_ts is None else RequestStatus.PREEMPTED

    # -- plan ----------------------------------------------------------------------------------------------------------

    def plan(self, in_flight: Sequence[StepPlan] = ()) -> StepPlan | None:
        """Return the next step, or None if nothing can run now; in_flight: the uncommitted plans, oldest first."""
        if [plan.step_id for plan in in_flight] != list(self._in_flight):
            raise ValueError(f"in_flight must name the uncommitted steps {list(self._in_flight)}, oldest first.")
        steps = [(plan, self._in_flight[plan.step_id]) for plan in in_flight]
        draft = StepDraft(self.config.max_num_batched_tokens, tally(steps))
        if self._plan_running(draft):
            self._plan_waiting(draft)
        finished = draft.finish(self._counters.num_steps)
        if finished is None:
            return None
        plan, requests = finished
        self._in_flight[plan.step_id] = requests
        self._counters.num_steps += 1
        self._counters.num_scheduled_tokens += self.config.max_num_batched_tokens - draft.budget
        self._register_planned(plan, requests)
        return plan

    def _plan_running(self, draft: StepDraft) -> bool:
        """Give running requests their tokens, in order; say whether there is room for others."""
        running, max_model_len = self._running, self.config.max_model_len
        index = 0
        while index < len(running):  # preemption shortens it
            request = running[index]
            index += 1
            ahead = draft.in_flight.get(request, NOTHING_IN_FLIGHT)
            num_tokens = len(request.token_ids) + ahead.num_sampled
            if ahead.num_sampled and (ahead.row is None or request.reaches_length(num_tokens, max_model_len)):
                continue  # its last token cannot be read yet, or ends it
            table = self.cache.tables[request.request_id]
            start = table.num_computed_tokens + ahead.num_tokens
            # One token is kept back for each request behind, so that a long prompt never stops the others' decoding.
            num_new = num_tokens - start
            if num_new > 1:
                num_new = self._limit(num_new, draft.budget - (len(running) - index))
            if not self._make_room(draft, request, table, start + num_new):
                return False
            draft.add(request, table, start, num_new)
            if not draft.budget:
                return False
        return not draft.num_preempted

    def _make_room(self, draft: StepDraft, request: Request, table: BlockTable, num_tokens: int) -> bool:
        """Grow the table, preempting from the end of the line; return False if the request must wait for blocks."""
        while not self.cache.grow(table, num_tokens):
            last = self._running[-1]
            # A request with rows in flight keeps its blocks. Nobody behind `request` is planned in this step, so the
            # next plan finds the last one free to preempt: the first in line always gets on.
            if last is request or last in draft.in_flight:
                return False
            self._preempt(last)
            draft.num_preempted += 1
        return True

    def _preempt(self, request: Request) -> None:
        """Take a running request's blocks away and put it back in line; what it computed may still be found."""
        self._running.remove(request)
        self.cache.close_table(request)
        self._waiting.push(request)
        self._counters.num_preemptions += 1

    def _plan_waiting(self, draft: StepDraft) -> None:
        """Admit waiting requests, in order, while budget, sequence slots and blocks remain."""
        while draft.budget and len(self._running) < self.config.max_num_seqs:
            request = self._waiting.peek()
            if request is None:
                return
            prefix = self.cache.find_prefix(request)
            start = len(prefix) * self.config.block_size
            num_missing = request.num_tokens - start
            num_new = self._limit(num_missing, draft.budget)
            if num_new < num_missing and not self.config.enable_chunked_prefill:
                return
            # All its tokens must fit, not just the first chunk: half-read prompts would crowd each other out.
            if not self.cache.fits(request.num_tokens, prefix):
                return
            self._admit(request, start)
            table = self.cache.open_table(request, prefix)
            self.cache.grow(table, start + num_new)
            draft.add(request, table, start, num_new)

    def _admit(self, request: Request, num_cached_tokens: int) -> None:
        """Move the first waiting request to its place among the running."""
        self._waiting.pop()
        insort(self._running, request, key=attrgetter("order"))
        if request.scheduled_ts is None:
            request.scheduled_ts = time.monotonic()
            request.num_cached_tokens = num_cached_tokens
            self._counters.num_queried_tokens += request.num_prompt_tokens
            self._counters.num_hit_tokens += num_cached_tokens

    def _limit(self, num_missing: int, budget: int) -> int:
        """Cut a chunk to what one request may have of a step's budget, at least one token."""
        threshold = self.config.long_prefill_token_threshold
        if threshold:
            num_missing = min(num_missing, threshold)
        return min(num_missing, max(1, budget))

    def _register_planned(self, plan: StepPlan, requests: list[Request]) -> None:
        # Steps run in order on the device: a later plan may share a block as soon as the step that fills it is planned.
        for chunk, request in zip(plan.chunks, requests, strict=True):
            num_known = min(chunk.start + len(chunk.token_ids), len(request.token_ids))
            self.cache.register(request, self.cache.tables[request.request_id], num_known)

    # -- commit --------------------------------------------------------------------------------------------------------

    def commit(self, plan: StepPlan, result: StepResult) -> list[EngineCoreOutput]:
        """Record what the oldest step in flight computed; return an output for each request that got a token."""
        if plan.step_id != next(iter(self._in_flight), None):
            raise ValueError(f"Step {plan.step_id} is not the oldest uncommitted one of {list(self._in_flight)}.")
        requests = self._in_flight.pop(plan.step_id)
        outputs, num_ended = [], 0
        for chunk, request, token_id, logprobs in zip(
            plan.chunks, requests, result.token_ids, result.logprobs, strict=True
        ):
            if request.finish_reason is not None:
                continue  # ended while this step was in flight
            table = self.cache.tables[request.request_id]
            table.num_computed_tokens += len(chunk.token_ids)
            if not chunk.samples:
                continue
            request.token_ids.append(token_id)
            self.cache.register(request, table, table.num_computed_tokens)
            finish_reason, stop_reason = find_end(request, self.config.max_model_len) or (None, None)
            if finish_reason is not None:
                self.cache.close_table(request)
                self._end(request, finish_reason)
                num_ended += 1
            outputs.append(_output(request, [token_id], logprobs, finish_reason, stop_reason))
        if num_ended:
            self._running = [request for request in self._running if request.finish_reason is None]
        return outputs

    def _end(self, request: Request, finish_reason: str) -> None:
        request.finish_reason = finish_reason
        del self._requests[request.request_id]

    # -- the state, seen from outside ----------------------------------------------------------------------------------

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; return False, and forget nothing, while any block is in use."""
        return self.cache.pool.forget_all()

    def stats(self) -> SchedulerStats:
        counters = self._counters
        return SchedulerStats(
            num_running_reqs=len(self._running),
            num_waiting_reqs=len(self._waiting),
            num_blocks=self.config.num_blocks,
            num_blocks_in_use=self.cache.pool.num_in_use,
            num_preemptions=counters.num_preemptions,
            prefix_cache_queries=counters.num_queried_tokens,
            prefix_cache_hits=counters.num_hit_tokens,
            num_steps=counters.num_steps,
            num_scheduled_tokens=counters.num_scheduled_tokens,
        )

    def check(self) -> None:
        """Assert the laws of queues, tables and pool, recomputed from the live block tables."""
        waiting, running = list(self._waiting), self._running
        assert len(waiting) + len(running) == len(self._requests), "a request is lost or in line twice"
        assert {*waiting, *running} == set(self._requests.values()), "the queues hold a stranger"
        assert all(request.finish_reason is None for request in self._requests.values()), "an ended request is kept"
        assert running == sorted(running, key=attrgetter("order")), "the running requests are out of order"
        assert len(running) <= self.config.max_num_seqs, "too many running requests"
        self.cache.check(running)


def _output(
    request: Request,
    new_token_ids: list[int],
    logprobs: TokenLogprobs | None,
    finish_reason: str | None,
    stop_reason: int | None,
) -> EngineCoreOutput:
    new_logprobs = None if logprobs is None or request.params.logprobs is None else [logprobs]
    return EngineCoreOutput(
        request_id=request.request_id,
        new_token_ids=new_token_ids,
        new_logprobs=new_logprobs,
        finish_reason=finish_reason,
        stop_reason=stop_reason,
        num_cached_tokens=request.num_cached_tokens,
        queued_ts=request.queued_ts,
        scheduled_ts=request.scheduled_ts or 0.0,
    )
