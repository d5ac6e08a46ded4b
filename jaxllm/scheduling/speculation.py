"""Decide which requests' next tokens are guessed, and how many guesses a step checks.

Guesses become drafts, tokens at the end of a chunk, and a row is sampled before each of them. A row's token depends
only on its seed, its position and the tokens before it, so a draft that equals its row's token is what a separate step
would have sampled: the outputs are the same, to the bit where rows do not depend on their batch.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Collection, Sequence
from functools import partial
from operator import itemgetter

from jaxllm.core_messages import SpeculationStats
from jaxllm.scheduling.cache.kv_cache_manager import KVCacheManager
from jaxllm.scheduling.draft_steps import DraftPlan, DraftSteps
from jaxllm.scheduling.plan import Chunk
from jaxllm.scheduling.prompts.step_times import StepTimes
from jaxllm.scheduling.request import Request
from jaxllm.scheduling.step_builder import Drafts, StepBuilder
from jaxllm.speculation.drafter import SpeculationSettings, make_drafter
from jaxllm.speculation.guesses import FIRST_RATE, GAIN, Guesses, ModelGuesses, TextGuesses

type CutDrafts = Callable[[str, int, array[int]], array[int]]
"""Returns the leading drafts of a request that its rules allow, and after which output continues, for the request's id
and number of outputs."""

_WAIT = 0.1
"""The largest share by which a step takes longer if it is planned after the one before, not while that runs."""
_NUM_TIMES = 16
"""The number of recent steps whose shortest time counts: others may have waited for a program to be compiled."""
PROBE, MOST_PROBE = 128, 4096
"""While a draft model's guesses do not pay, it makes some after PROBE tokens to see whether they would, then each time
after twice as many, up to MOST_PROBE."""
_NUM_PROBED = 2
"""The number of guesses about one request in such a probe."""


def keep_drafts(_request_id: str, _num_output_tokens: int, drafts: array[int]) -> array[int]:
    """Return all drafts of a request without rules."""
    return drafts


class Speculation:
    """Guess the next tokens of running requests, and count how many come true."""

    def __init__(self, settings: SpeculationSettings, cache: KVCacheManager, times: StepTimes) -> None:
        """Guess for the requests of a cache, by the measured `times` of steps."""
        self._settings, self._times = settings, times
        self._drafter = make_drafter(settings) if settings.draft_model is None else None
        self.begin(cache)
        self._first_rate = FIRST_RATE
        """The share of a draft model's guesses that came true, over recent requests."""
        self._guess_times: deque[float] = deque(maxlen=_NUM_TIMES)
        """Seconds of a draft model's step."""
        self._num_unguessed, self._probe = 0, PROBE
        """The number of tokens since the draft model last guessed, and the number after which it guesses even if that
        may not pay."""
        self._num_drafts, self._num_draft_tokens = 0, 0
        self._accepted_per_pos = [0] * settings.num_speculative_tokens

    def begin(self, cache: KVCacheManager) -> None:
        """Begin anew with another cache; the statistics are kept."""
        self._cache, limits = cache, self._settings.draft_model
        self._steps = None if limits is None else DraftSteps(limits, cache)
        """The draft model's steps, if a model guesses."""
        self._guesses: dict[Request, Guesses] = {}
        """The guesses about each request that has run, until it ends."""

    # -- guesses of a model --------------------------------------------------------------------------------------------

    def plan_guesses(self, running: Sequence[Request], most_rows: int) -> DraftPlan | None:
        """Return the draft model's steps to run before the next step is planned; None if none would pay.

        All tokens are known, and a step has at most `most_rows` rows of logits.
        """
        if self._steps is None or self._has_prompt(running):
            return None
        worth, num_free = self._worth(running, most_rows, self._cost(len(running)))
        # Some guesses may exist already, from a step that could not be planned.
        wanted = [(request, count) for request, guesses, count in worth if not guesses.after(request.token_ids)]
        if worth:
            self._num_unguessed, self._probe = 0, PROBE
        elif wanted := self._probed(running, num_free):
            self._num_unguessed, self._probe = 0, min(2 * self._probe, MOST_PROBE)
        return self._steps.plan(wanted)

    def _probed(self, running: Sequence[Request], num_free: int) -> list[tuple[Request, int]]:
        """Return the request without guesses for longest, with a number of guesses, if it is time for a probe.

        Nothing if no request can have enough guesses, or if `num_free` rows have no room for them.
        """
        if self._steps is None or self._num_unguessed < self._probe or num_free < _NUM_PROBED:
            return []
        can = [
            (guesses.num_unguessed(request.token_ids), request)
            for request in running
            if isinstance(guesses := self._guesses_of(request), ModelGuesses)
            and self._most_guesses(request) >= _NUM_PROBED
        ]
        return [(max(can, key=itemgetter(0))[1], _NUM_PROBED)] if can else []

    def take_guesses(self, plan: DraftPlan, sampled: Sequence[Sequence[int]], seconds: float) -> None:
        """Take the tokens that each of the draft model's steps sampled, in `seconds` seconds."""
        assert self._steps is not None
        if plan.steps[0].num_tokens <= 2 * len(plan.requests[0]):  # and not a prompt
            self._guess_times.append(seconds / len(plan.steps))
        for request, token_ids in self._steps.take(plan, sampled):
            guesses = self._guesses[request]
            assert isinstance(guesses, ModelGuesses)
            guesses.take(token_ids, request.num_tokens)

    def _has_prompt(self, running: Sequence[Request]) -> bool:
        """Return whether a request has tokens to compute before its next one: it should not wait for guesses."""
        tables = self._cache.tables
        return any(request.num_tokens - tables[request.request_id].num_computed_tokens > 1 for request in running)

    # -- drafts --------------------------------------------------------------------------------------------------------

    def pays(self, running: Sequence[Request], most_rows: int, is_seat_wanted: bool = False) -> bool:
        """Return whether drafts gain more tokens than are lost by planning a step only after the one before.

        Only then are the tokens before the drafts known. A step has at most `most_rows` rows of logits; a draft model
        does not guess while a request waits and a seat is free.
        """
        if self._steps is not None and (is_seat_wanted or self._has_prompt(running)):
            return False
        cost = self._cost(len(running))
        worth, num_free = self._worth(running, most_rows, cost)
        gain = sum(guesses.gain(count, cost) for _, guesses, count in worth)
        return gain > _WAIT * len(running) or bool(self._probed(running, num_free))

    def add_drafts(self, step: StepBuilder, cut: CutDrafts) -> None:
        """Give drafts to the requests of a step, from its remaining tokens, rows and blocks."""
        step.add_drafts(partial(self._drafts_after, self._cost(step.num_planned), cut))

    def _drafts_after(self, cost: float, cut: CutDrafts, request: Request, chunk: Chunk, at_most: int) -> Drafts | None:
        """Return at most `at_most` drafts after a chunk of one token; None if it gets none."""
        if chunk.previous_row is not None or not chunk.samples:
            return None
        guesses = self._guesses_of(request)
        count = min(self._num_worth(request, guesses, cost), at_most, self._cache.most_drafts())
        if count <= 0:
            return None
        drafts = cut(request.request_id, request.num_output_tokens, guesses.after(request.token_ids)[:count])
        table = self._cache.tables[request.request_id]
        # The last blocks are for tokens that are certain.
        if not drafts or not self._cache.grow(table, request.num_tokens + len(drafts), spare=len(self._cache.tables)):
            return None
        return Drafts(drafts, table.shown(), self._cache.plan_drafts(table, chunk.state_slots, len(drafts)))

    def record(self, request: Request, num_new: int, num_drafts: int) -> None:
        """Take in the request's new tokens, which are its last ones."""
        if self._steps is not None:
            self._steps.drop_guesses(request)
        self._num_unguessed += num_new
        guesses = self._guesses.get(request)
        if guesses is None:
            return
        guesses.compare(request.token_ids[-num_new:], request.num_tokens - num_new)
        if num_drafts:
            self._num_drafts += 1
            self._num_draft_tokens += num_drafts
            for position in range(num_new - 1):
                self._accepted_per_pos[position] += 1

    def end(self, request: Request) -> None:
        """Drop the guesses about a request that has ended, and learn from it if its answer is whole."""
        if self._steps is not None:
            self._steps.end(request)
        guesses = self._guesses.pop(request, None)
        if guesses is None or request.finish_reason in ("abort", "error"):
            return
        if isinstance(guesses, ModelGuesses):
            self._first_rate += GAIN * (guesses.rate - self._first_rate)
        elif self._drafter is not None:
            self._drafter.learn(request.token_ids, request.num_prompt_tokens)

    def stats(self) -> SpeculationStats:
        """Return the counts since the start."""
        return SpeculationStats(
            num_drafts=self._num_drafts,
            num_draft_tokens=self._num_draft_tokens,
            num_accepted_tokens=sum(self._accepted_per_pos),
            num_accepted_tokens_per_pos=list(self._accepted_per_pos),
        )

    def _worth(
        self, running: Sequence[Request], most_rows: int, cost: float
    ) -> tuple[list[tuple[Request, Guesses, int]], int]:
        """Return the requests with drafts that pay, each with its guesses and their number, and the free rows.

        These are the rows that are left of `most_rows`.
        """
        worth, num_free = [], most_rows - len(running)
        for request in running:
            guesses = self._guesses_of(request)
            count = min(self._num_worth(request, guesses, cost), num_free)
            if count > 0:
                worth.append((request, guesses, count))
                num_free -= count
        return worth, num_free

    def _most_guesses(self, request: Request) -> int:
        """Return the most guesses about a request that can be used."""
        num_left = request.most_tokens - request.num_tokens
        limits = self._settings.draft_model
        return num_left - 1 if limits is None else min(num_left - 1, limits.max_model_len - request.num_tokens)

    def _num_worth(self, request: Request, guesses: Guesses, cost: float) -> int:
        """Return the number of drafts of the request that pay at their cost."""
        if not request.num_output_tokens:
            return 0  # its prompt is certain, and a pooling request has nothing else
        return min(guesses.look(request.token_ids, cost), self._most_guesses(request))

    def _guesses_of(self, request: Request) -> Guesses:
        guesses = self._guesses.get(request)
        if guesses is None:
            most = self._settings.num_speculative_tokens
            if self._drafter is None:
                # However well other requests did, a few guesses are enough to see how this one does.
                guesses = ModelGuesses(most, min(self._first_rate, FIRST_RATE), request.num_tokens)
            else:
                guesses = TextGuesses(self._drafter, most)
            self._guesses[request] = guesses
        return guesses

    def _cost(self, num_rows: int) -> float:
        """Return the time that a draft and its guess add to a step of `num_rows` rows of tokens, times the tokens that
        such a step gives in that time.
        """
        share = self._times.share_of_token(num_rows, num_rows * (1 + self._settings.num_speculative_tokens))
        if share is None:  # no step with drafts has been measured lately
            share = 1 / (num_rows + self._settings.num_free_rows)
        seconds = self._times.seconds(num_rows)
        # A step of the draft model gives a guess about each row.
        guess = min(self._guess_times) / seconds if self._guess_times and seconds else 0.0
        return num_rows * share + guess

    def check(self, requests: Collection[Request]) -> None:
        """Assert that all guesses are about one of these requests."""
        assert self._guesses.keys() <= set(requests), "guesses about an ended request are kept"
        if self._steps is not None:
            self._steps.check(requests)
