"""Decide which tokens run next.

There is no prefill phase and no decode phase: a request has tokens, some of them computed, and every step closes a part
of the gap within one token budget. This one rule covers a new prompt, a chunk of a long one, a decode and the return of
a preempted request.

`plan` may change the queues, the block tables, the rows of counts and the pool. Only `commit`, and an end from outside,
changes a request's tokens, its computed count and its end. So a step can be planned while the one before it still runs.

A fork is a request that names a donor, another request with the same beginning. It waits until the donor's prompt is
planned, then shares its blocks. This is a cache too: the tokens of a fork never depend on the donor's fate.
"""

from __future__ import annotations

import time
from bisect import insort
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter

from jaxllm.core_messages import EngineCoreOutput, EngineCoreRequest, NextTokens, RequestError, SchedulerStats
from jaxllm.exceptions import VLLMValidationError
from jaxllm.scheduling.admission import Admission
from jaxllm.scheduling.cache.fetch_times import FetchTimes
from jaxllm.scheduling.cache.kv_cache_manager import KVCacheManager, PrefixHit
from jaxllm.scheduling.cache.state_slots import NO_SLOTS
from jaxllm.scheduling.cache.tiers import Files, TierCounts, Tiers
from jaxllm.scheduling.config import SchedulerConfig
from jaxllm.scheduling.decodes import Continuing
from jaxllm.scheduling.draft_steps import DraftPlan
from jaxllm.scheduling.forks import Forks
from jaxllm.scheduling.holdings import Holdings
from jaxllm.scheduling.plan import StepKind, StepPlan, StepResult
from jaxllm.scheduling.prompts.line import PromptLine
from jaxllm.scheduling.prompts.shares import PromptShares
from jaxllm.scheduling.prompts.step_times import StepTimes
from jaxllm.scheduling.request import Request, check_limits
from jaxllm.scheduling.request_queue import RequestQueue, order_of
from jaxllm.scheduling.results import make_output, take_pooled, take_samples
from jaxllm.scheduling.speculation import CutDrafts, Speculation, keep_drafts
from jaxllm.scheduling.step_builder import NOTHING_IN_FLIGHT, StepBuilder, tally
from jaxllm.scheduling.step_kinds import StepKinds


@dataclass(slots=True)
class _Counters:
    """The counts since the scheduler was made."""

    num_arrivals: int = 0
    num_steps: int = 0
    num_scheduled_tokens: int = 0
    num_preemptions: int = 0
    num_queries: int = 0
    num_queried_tokens: int = 0
    num_hit_tokens: int = 0


class Scheduler:
    """Plan steps, commit their results, and end requests."""

    def __init__(
        self, config: SchedulerConfig, clock: Callable[[], float] = time.monotonic, files: Files | None = None
    ) -> None:
        """Use `clock`, in seconds. `files` are the blocks that are kept in files too, if any are."""
        self.config, self._clock, self._files = config, clock, files
        self._counters = _Counters()
        self._times = StepTimes()
        self.fetch_times = FetchTimes(self._times, config.max_num_batched_tokens)
        """They tell whether a prefix comes sooner from a tier than by computing."""
        self._tier_counts = TierCounts()
        self._begin()
        settings = config.speculation
        self._speculation = None if settings is None else Speculation(settings, self.cache, self._times)
        self._has_columns = settings is None and self.cache.slots is None
        """Whether a decode needs nothing but its position and its blocks."""

    def _begin(self) -> None:
        self.cache = KVCacheManager(self.config)
        self.tiers = Tiers(self.cache, self.config.num_host_blocks, self.fetch_times, self._tier_counts, self._files)
        self._requests: dict[str, Request] = {}
        self._kinds = StepKinds()
        shares = PromptShares(self.config, self._times)
        self._waiting = RequestQueue(sorts_by_length=shares.short_prompts_pass)
        self._forks = Forks(self.cache, self._waiting)
        self._running: list[Request] = []
        """The requests with a block table, in the policy's order: the last one is preempted first."""
        self._holdings = held = Holdings(self.config, self._clock)
        self._seats, self.adapters, self.media, self.clips = held.seats, held.adapters, held.media, held.clips
        self._are_rows_given_up = False
        """True if the plan being made had to take rows of media from a request that lacks blocks."""
        self._continuing = Continuing(self.cache, self._waiting)
        self._end_ids: set[int] = set()
        """The tokens that end some unfinished request, at least."""
        self._prompts = PromptLine(shares, self.cache, self._waiting)
        cuts_prompts = self.config.enable_chunked_prefill
        self._admission = Admission(
            self._waiting, self._prompts, self.cache, self._forks, self.tiers, held, cuts_prompts=cuts_prompts
        )
        self._in_flight: dict[int, tuple[StepPlan, list[Request]]] = {}
        """The plans not committed yet with the requests of their rows, by step id, oldest first."""

    # -- requests come and go ------------------------------------------------------------------------------------------

    def add_request(self, request: EngineCoreRequest) -> None:
        """Put a request in line; raise VLLMValidationError if its id is in use, or its prompt cannot run."""
        if request.request_id in self._requests:
            message = f"Request id {request.request_id!r} is in use: wait for it to end or choose another id."
            raise VLLMValidationError(message, parameter="request_id", value=request.request_id)
        order = order_of(request, self._counters.num_arrivals, self.config.policy)
        donor = None if request.fork_of is None else self._find_donor(request.fork_of)
        entry = Request(request, order, self._clock(), donor, self.config.whole_tasks, self.config.max_model_len)
        entry.num_seats = min(entry.num_seats, self.config.max_num_seqs)
        check_limits(entry, self.config)
        self._counters.num_arrivals += 1
        self._requests[request.request_id] = entry
        self._kinds.add(entry.kind)
        self._end_ids.update(entry.end_ids)
        self._waiting.push(entry)

    def _find_donor(self, request_id: str) -> Request | None:
        parked, _ = self.cache.parked.get(request_id, (None, None))
        return self._requests.get(request_id, parked)

    def abort_requests(self, request_ids: Iterable[str]) -> list[EngineCoreOutput]:
        """End requests and free their blocks at once, even with a step in flight; ignore unknown ids."""
        return [output for request_id in request_ids for output in self.end(request_id, "abort")]

    def end(self, request_id: str, finish_reason: str, error: RequestError | None = None) -> list[EngineCoreOutput]:
        """End a request now and return its last output, None if the id is unknown. `error` describes a failure."""
        request = self._requests.get(request_id)
        if request is None:
            return []
        if request not in self._waiting:
            self._running.remove(request)
        self._end(request, finish_reason)
        return [make_output(request, [], finish_reason=finish_reason, error=error)]

    def release(self, request_ids: Iterable[str]) -> None:
        """Release the seats of requests, and their blocks once no waiting fork needs them; ignore unknown ids."""
        for request_id in request_ids:
            self._seats.release(request_id)
            parked, _ = self.cache.parked.get(request_id, (None, None))
            for request in (self._requests.get(request_id), parked):
                if request is not None:
                    request.keeps_blocks = False
                    self._forks.close_unwanted(request)

    def abandon(self, error: RequestError) -> list[EngineCoreOutput]:
        """End all requests with an error and begin anew.

        What a failed step wrote is unknown, and it may have stopped with the queues and the pool half changed.
        """
        requests = list(self._requests.values())
        self._begin()
        if self._speculation is not None:
            self._speculation.begin(self.cache)
        for request in requests:
            request.finish_reason = "error"
        return [make_output(request, [], finish_reason="error", error=error) for request in requests]

    def _end(self, request: Request, finish_reason: str) -> None:
        """Remove a request from everything but the running list."""
        if request in self._waiting:
            self._waiting.remove(request)
            self.tiers.release(request)
            self.adapters.forget(request)
            request.finish_reason = finish_reason
        else:
            request.finish_reason, request.row_step = finish_reason, -1
            self._give_back(request)
            if finish_reason not in ("abort", "error") and self._forks.wants(request):
                self.cache.park(request)
                if request.keeps_blocks:
                    self._seats.hold(request)
            else:
                self.cache.close_table(request)
        del self._requests[request.request_id]
        self._kinds.remove(request.kind)
        if self._speculation is not None:
            self._speculation.end(request)
        donor, request.donor = request.donor, None
        if donor is not None:
            self._forks.close_unwanted(donor)

    def has_unfinished_requests(self) -> bool:
        return bool(self._requests)

    # -- plan ----------------------------------------------------------------------------------------------------------

    def plan(self, late: Collection[str] = (), cut_drafts: CutDrafts = keep_drafts) -> StepPlan | None:
        """Return the next step, or None if nothing can run now. Requests in `late` are left out."""
        self.cache.begin_plan()
        late = self.tiers.late(late)
        self._are_rows_given_up = False
        for kind in self._kinds.in_turn():
            step = StepBuilder(self.config, kind, self.adapters, self.media, self.clips, self._most_prompt_tokens(kind))
            shares = self._admission.share_out(step, self._running, late)
            self._continue(step, late)
            if not self._leaves_prompts_out(step):
                self._fill(step, late, shares)
            if shares and not step.num_planned:  # those that have shares cannot use them
                self._fill(step, late, {})
            if self._speculation is not None:
                self._speculation.add_drafts(step, cut_drafts)
            finished = step.finish(self._counters.num_steps)
            if finished is None:
                continue
            plan, requests = finished
            self._kinds.has_planned(kind)
            self._in_flight[plan.step_id] = finished
            self._counters.num_steps += 1
            self._counters.num_scheduled_tokens += self.config.max_num_batched_tokens - step.num_tokens
            self._put_in_flight(plan, requests)
            if self._has_columns:
                self._continuing.follow(plan, requests)
            return plan
        return self.plan(late, cut_drafts) if self._are_rows_given_up else None

    def _continue(self, step: StepBuilder, late: Collection[str]) -> None:
        """Give those that the last step samples for their next tokens, if there is room for these and all others.

        Otherwise the policy's order decides, in `_plan_running`: an image that must be whole may take the whole step.
        """
        if step.kind is not StepKind.SAMPLE or not self._has_columns:
            return
        reading, num_running, last_step = self._prompts.reading, len(self._running), self._counters.num_steps - 1
        if num_running > min(step.num_tokens, step.num_rows) or any(request.media for request in reading):
            self._continuing.forget()
        else:
            num_missing = sum(request.num_tokens - self._prompts.num_planned(request) for request in reading)
            rows = self._continuing.advance(
                last_step,
                late,
                are_known=last_step not in self._in_flight,
                num_running=num_running,
                num_prompt_tokens=min(num_missing, step.num_tokens),
            )
            step.begin_with(*rows)

    def _leaves_prompts_out(self, step: StepBuilder) -> bool:
        """Return whether a step with rows has them alone, although prompts are in line."""
        return step.has_begun and bool(self._prompts) and self._prompts.shares.leaves_prompts_out(step.num_planned)

    def _fill(self, step: StepBuilder, late: Collection[str], shares: Mapping[Request, int]) -> None:
        if self._plan_running(step, late, shares):
            self._plan_waiting(step, late, shares)

    def _most_prompt_tokens(self, kind: StepKind) -> int | None:
        """Return the most tokens of prompts in a step, as the running streams allow; None for no such limit."""
        if self.config.step_target is None or not self._prompts:
            return None
        num_streams = self._prompts.num_read(StepKind.SAMPLE, self._running) + self._waiting.num_later_steps
        num_prompts = self._prompts.num_in_line(self.config.max_num_seqs - len(self._running))
        return self._prompts.shares.most_tokens(num_streams, num_prompts, are_beside=kind is StepKind.SAMPLE)

    def plan_guesses(self) -> DraftPlan | None:
        """Return the draft model's steps to run before `plan`.

        None if there are none, if a step is in flight, or if a seat is free for a waiting request.
        """
        if self._speculation is None or self._in_flight or self._is_seat_wanted():
            return None
        return self._speculation.plan_guesses(self._running, self.config.num_rows)

    def _is_seat_wanted(self) -> bool:
        """Return whether a request waits while a seat is free."""
        return len(self._waiting) > 0 and len(self._running) < self.config.max_num_seqs

    def take_guesses(self, plan: DraftPlan, sampled: Sequence[Sequence[int]], seconds: float) -> None:
        """Take the tokens that each of the draft model's steps sampled, in `seconds` seconds."""
        assert self._speculation is not None
        self._speculation.take_guesses(plan, sampled, seconds)

    def waits_for_commit(self) -> bool:
        """Return whether to commit before `plan`.

        That is if more running requests wait for a token in flight than could continue, or if drafts, which follow
        known tokens, gain more than planning while a step runs.
        """
        speculation, running = self._speculation, self._running
        if speculation is not None or any(map(attrgetter("waits_for_last_token"), running)):
            num_held = sum(request.num_unknown > 0 and not self._can_continue(request) for request in running)
            if 2 * num_held > len(running):
                return True
        return speculation is not None and speculation.pays(running, self.config.num_rows, self._is_seat_wanted())

    def _can_continue(self, request: Request) -> bool:
        """Return whether the next step may follow a token that is being sampled: the device reads the last step's."""
        is_known = request.row >= 0 and request.row_step == self._counters.num_steps - 1
        return is_known and not request.waits_for_last_token

    def _plan_running(self, step: StepBuilder, late: Collection[str], shares: Mapping[Request, int]) -> bool:
        """Give running requests their tokens, in order; return whether waiting requests may follow."""
        running, cache, waiting = step.others(self._running), self.cache, self._waiting
        last_step = self._counters.num_steps - 1
        tables, block_size, kind, reading = cache.tables, cache.block_size, step.kind, self._prompts.reading
        index = 0
        while index < len(running):  # preemption shortens it
            request = running[index]
            index += 1
            if request.kind is not kind or (late and request.request_id in late):
                continue
            num_tokens = len(request.token_ids) + request.num_unknown
            if request.num_unknown and (
                request.row_step != last_step
                or request.row < 0
                or request.waits_for_last_token
                or num_tokens >= request.most_tokens
            ):
                continue  # its last token cannot be read yet, or ends it
            table = tables[request.request_id]
            start = table.num_computed_tokens + request.num_planned
            num_new = num_tokens - start
            if not num_new:
                continue  # its last chunk is in flight, and gives its output
            if num_new > 1 or (request.media is not None and request.reads_media(start)):
                # A token is kept back for each request behind: a long prompt never stops the others' decoding. Steps of
                # beam searches come back to the queue after each token, and must continue like decodes.
                num_steps = self._waiting.num_later_steps if step.kind is StepKind.SAMPLE else 0
                num_behind = len(running) - index + num_steps
                num_shared, share = table.num_shared_tokens, shares.get(request)
                num_new = step.limit(request, start, num_new, num_shared, num_behind, share)
                if not num_new:
                    continue
            end, has_forks = start + num_new, waiting.has_forks and waiting.num_forks(request) > 0
            if cache.is_bounded and not has_forks:
                cache.trim(table, start)
            is_covered = len(table.block_ids[0]) * block_size >= end or cache.grow(table, end)
            if not is_covered and not self._make_room(step, request, start, num_new):
                # A request before it may have the blocks that it lacks, and wait for the rows of media that it holds.
                self._are_rows_given_up = self.media.release(request.request_id)
                return False
            slots = NO_SLOTS if cache.slots is None else cache.plan_state(request, table, start, num_new, has_forks)
            step.add(request, table, start, num_new, slots)
            if end == num_tokens and reading:
                reading.pop(request, None)
            if step.is_spent:
                return False
        return not step.num_preempted

    def _make_room(self, step: StepBuilder, request: Request, start: int, num_tokens: int) -> bool:
        """Grow a table; return False if blocks are short.

        Blocks that are parked for forks are given up first, then the last requests in line are preempted.
        """
        table = self.cache.tables[request.request_id]
        self.cache.trim(table, start)
        while not self.cache.grow(table, start + num_tokens):
            assert not step.has_begun, "there are blocks for all"
            if self.cache.give_up_parked(spared=()) or self.tiers.give_up():
                continue
            last = self._running[-1]
            # A request with rows in flight keeps its blocks. No request behind `request` is planned in this step, so
            # the next plan can preempt the last one: the first in line always makes progress.
            if last is request or last.num_planned:
                return False
            self._preempt(last)
            step.num_preempted += 1
        return True

    def _preempt(self, request: Request) -> None:
        """Take a running request's blocks away and put it back in line; the cache may still have what it computed."""
        self._running.remove(request)
        self._give_back(request)
        self.cache.close_table(request)
        request.row_step = -1
        self._waiting.push(request)
        request.pooled.clear()
        request.num_preemptions += 1
        self._counters.num_preemptions += 1

    def _give_back(self, request: Request) -> None:
        """Give back what a request that stops running has besides its blocks."""
        self._prompts.reading.pop(request, None)
        self._holdings.give_back(request)

    def _plan_waiting(self, step: StepBuilder, late: Collection[str], shares: Mapping[Request, int]) -> None:
        """Admit waiting requests while the step, its sequences and the blocks have room."""
        while not step.is_spent and len(self._running) < self.config.max_num_seqs:
            admitted = self._admission.next(step, late, shares)
            if admitted is None:
                break
            self._admit(*admitted, step)
        self._waiting.restore()
        for donor in step.donors:
            self._forks.close_unwanted(donor)

    def _admit(self, request: Request, hit: PrefixHit, num_new: int, step: StepBuilder) -> None:
        """Move a waiting request to its place among the running and plan its first chunk."""
        start = hit.num_tokens
        self._waiting.remove(request)
        insort(self._running, request, key=attrgetter("order"))
        if start + num_new < request.num_tokens:
            self._prompts.reading[request] = None
        if request.scheduled_ts is None:
            request.scheduled_ts = self._clock()
            request.num_cached_tokens = start
            if self.cache.looks_up(request):
                self._counters.num_queries += 1
                self._counters.num_queried_tokens += request.num_prompt_tokens
                self._counters.num_hit_tokens += start - self.tiers.count_hit(request, start)
        self._holdings.take(request)
        table = self.cache.open_table(request, hit, start + num_new)
        self.tiers.release(request)
        for group, source in enumerate(hit.copied_blocks or ()):
            step.copy(group, source, table.block_ids[group][len(hit.block_ids[group])])
        if request.donor is not None:
            step.donors[request.donor] = None
        slots = self.cache.plan_state(request, table, start, num_new, self._waiting.num_forks(request) > 0)
        step.add(request, table, start, num_new, slots, is_admitted=True)

    def _put_in_flight(self, plan: StepPlan, requests: list[Request]) -> None:
        """Count a plan's tokens as planned, and register the blocks that it fills.

        Steps run in order on the device: a later plan may share a block as soon as the step that fills it is planned.
        """
        step_id, num_decodes = plan.step_id, len(plan.decodes.starts)
        for row in range(num_decodes):
            request = requests[row]
            request.num_planned += 1
            request.num_unknown += 1
            request.row, request.row_step = row, step_id
        others = zip(plan.others, requests[num_decodes:], strict=True)
        for row, (chunk, request) in enumerate(others, start=num_decodes):
            request.num_planned += len(chunk.token_ids)
            request.num_unknown += chunk.samples
            request.row, request.row_step = row if chunk.samples and not chunk.num_drafts else -1, step_id
            if chunk.previous_row is not None:
                continue  # its token is not known
            end = chunk.start + len(chunk.token_ids) - chunk.num_drafts
            self.cache.register(request, self.cache.tables[request.request_id], end)
            self.cache.register_state(request, chunk.state_slots.save, chunk.state_slots.save_at)

    # -- commit --------------------------------------------------------------------------------------------------------

    def commit(self, plan: StepPlan, result: StepResult) -> tuple[list[EngineCoreOutput], NextTokens]:
        """Record the result of the oldest step in flight; return an output for each request that got one, and the
        tokens of those that go on and need no output.
        """
        if plan.step_id != next(iter(self._in_flight), None):
            raise ValueError(f"Step {plan.step_id} is not the oldest uncommitted one of {list(self._in_flight)}.")
        _, requests = self._in_flight.pop(plan.step_id)
        is_plain = plan.kind is StepKind.SAMPLE and not (plan.encodes or plan.clips or plan.adapter_loads)
        if result.seconds and is_plain:
            self._times.record(plan.num_tokens, result.seconds)
        for chunk, request in zip(plan.others, requests[len(plan.decodes.starts) :], strict=True):
            request.num_planned -= len(chunk.token_ids)
            request.num_unknown -= chunk.samples
        if plan.kind is StepKind.SAMPLE:
            taken = take_samples(self.cache, plan, requests, result, self._end_ids, self._speculation)
        else:
            taken = take_pooled(self.cache, plan, requests, result)
        for request, finish_reason in taken.ended:
            self._end(request, finish_reason)
        if taken.ended:
            self._running = [request for request in self._running if request.finish_reason is None]
            if not self._requests:
                self._end_ids.clear()
        return taken.outputs, taken.next_tokens

    # -- the state, seen from outside ----------------------------------------------------------------------------------

    def num_computed_tokens(self, request_id: str) -> int:
        """Return the number of a request's computed tokens; 0 unless it runs."""
        table = self.cache.tables.get(request_id)
        return 0 if table is None else table.num_computed_tokens

    def leave_files(self) -> None:
        """Use the blocks in files no more: they are of weights that have been replaced."""
        self._files = None
        self.tiers.leave_files()

    def reset_prefix_cache(self, preempt: bool = False, *, with_host: bool = False, with_files: bool = True) -> bool:
        """Forget all cached prefixes and parked tables; return False, and forget nothing, while any request runs.

        With `preempt`, which requires that no step is in flight, the running requests give up their blocks first. With
        `with_host` what the host keeps is forgotten too, `with_files` what it keeps in files.
        """
        while self._running and preempt:
            self._preempt(self._running[-1])
        if self._running:
            return False
        while self.cache.give_up_parked(spared=()) or self.tiers.give_up():
            pass
        if with_host:
            self.tiers.forget_all(with_files=with_files)
        return self.cache.forget_all()

    def stats(self) -> SchedulerStats:
        counters, fullest = self._counters, self.cache.fullest()
        usages = [(fullest.num_in_use, fullest.num_blocks), self.clips.usage]
        num_in_use, num_blocks = max(usages, key=lambda usage: usage[0] / max(1, usage[1]))
        return SchedulerStats(
            num_running_reqs=len(self._running),
            num_waiting_reqs=len(self._waiting),
            num_blocks=num_blocks,
            num_blocks_in_use=num_in_use,
            num_preemptions=counters.num_preemptions,
            prefix_cache_requests=counters.num_queries,
            prefix_cache_queries=counters.num_queried_tokens,
            prefix_cache_hits=counters.num_hit_tokens,
            num_steps=counters.num_steps,
            num_scheduled_tokens=counters.num_scheduled_tokens,
            speculation=None if self._speculation is None else self._speculation.stats(),
        )

    def check(self) -> None:
        """Assert the laws of queues, rows of counts, tables and pool, recomputed from the live block tables."""
        waiting, running = list(self._waiting), self._running
        assert len(waiting) + len(running) == len(self._requests), "a request is lost or in line twice"
        assert {*waiting, *running} == set(self._requests.values()), "the queues hold a stranger"
        assert all(request.finish_reason is None for request in self._requests.values()), "an ended request is kept"
        assert running == sorted(running, key=attrgetter("order")), "the running requests are out of order"
        self._holdings.check(running)
        self._prompts.check(running)
        self._continuing.check(self._counters.num_steps - 1)
        self._waiting.check()
        self._kinds.check(Counter(request.kind for request in self._requests.values()))
        if self._speculation is not None:
            self._speculation.check(self._requests.values())
        assert all(self._forks.wants(request) for request, _ in self.cache.parked.values()), "parked to no purpose"
        in_flight = tally(self._in_flight.values())
        for request in running:
            ahead = in_flight.get(request, NOTHING_IN_FLIGHT)
            assert (request.num_planned, request.num_unknown) == ahead[:2], "tokens in flight are miscounted"
            row = request.row if request.row >= 0 and request.row_step == self._counters.num_steps - 1 else None
            assert not request.num_unknown or row == ahead.row, "the row in flight is another one"
            num_missing = request.num_tokens - self.num_computed_tokens(request.request_id) - request.num_planned
            is_read = request in self._prompts.reading
            assert num_missing > 0 if is_read else num_missing <= 1, "a prompt is lost sight of"
        self.cache.check({request: request.num_planned for request in running}, self.tiers.held)
        self.tiers.check(waiting)
