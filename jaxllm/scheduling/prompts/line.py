"""The prompts in line: the ones being read, the ones that wait, and what they may have of a step."""

from __future__ import annotations

from collections.abc import Collection
from itertools import islice

from jaxllm.scheduling.adapter_slots import AdapterSlots
from jaxllm.scheduling.cache.kv_cache_manager import KVCacheManager
from jaxllm.scheduling.forks import Forks
from jaxllm.scheduling.plan import StepKind
from jaxllm.scheduling.prompts.shares import Prompt, PromptShares, order_of_prompt
from jaxllm.scheduling.request import Request
from jaxllm.scheduling.request_queue import RequestQueue
from jaxllm.scheduling.seats import Seats

_MOST_SHARING = 16
"""The most waiting prompts that a step is shared among: the shortest."""


class PromptLine:
    """Decide which prompt is admitted next, and how the prompts in line share a step."""

    def __init__(
        self,
        shares: PromptShares,
        cache: KVCacheManager,
        waiting: RequestQueue,
        forks: Forks,
        adapters: AdapterSlots,
        seats: Seats,
    ) -> None:
        self.shares = shares
        self._cache, self._waiting, self._forks = cache, waiting, forks
        self._adapters, self._seats = adapters, seats
        self.reading: dict[Request, None] = {}
        """The running requests whose last chunk is not planned yet, in no order."""

    def __bool__(self) -> bool:
        """Return whether any prompt is being read or waits."""
        return bool(self.reading or len(self._waiting))

    def num_in_line(self, num_free_seats: int) -> int:
        """Return the number of prompts that are read, and of those that wait for nothing but their turn."""
        return len(self.reading) + min(len(self._waiting), num_free_seats)

    def num_reading(self, kind: StepKind) -> int:
        """Return the number of requests of a kind that are being read."""
        return sum(request.kind is kind for request in self.reading)

    def share_out(self, kind: StepKind, num_tokens: int, late: Collection[str]) -> dict[Request, int]:
        """Return the most of a step's `num_tokens` tokens that prompts being read, and the first in line, may have.

        Short prompts pass. Other waiting prompts may have all that is left: they are admitted the shortest first.
        Requests in `late` have no part.
        """
        reading = [request for request in self.reading if request.kind is kind and request.request_id not in late]
        waiting = self._admissible(kind, num_tokens, late)
        prompts = [(request.num_tokens - self.num_planned(request), request) for request in reading] + waiting
        if len(prompts) < 2:
            return {}
        shares, first = self.shares.share_out(num_tokens, prompts), min(prompts, key=order_of_prompt)[1]
        return {request: shares[request] for request in {*reading, first}}

    def next_waiting(self, kind: StepKind) -> Request | None:
        """Return the waiting request to admit next: the first in line, or the shortest while another one is read."""
        head = self._waiting.peek()
        if head is None or not self.shares.short_prompts_pass:
            return head
        is_later = any(request.order < head.order for request in self.reading if request.kind is kind)
        return next(self._waiting.shortest(), None) if is_later else head

    def num_planned(self, request: Request) -> int:
        """Return the number of a running request's tokens that are computed before the next step."""
        return self._cache.tables[request.request_id].num_computed_tokens + request.num_planned

    def _admissible(self, kind: StepKind, num_tokens: int, late: Collection[str]) -> list[Prompt]:
        """Return the waiting prompts that could be admitted next, until they lack `num_tokens` tokens together.

        They come with the tokens that they lack.
        """
        head, first = self._waiting.peek(), self.next_waiting(kind)
        if first is None:
            return []
        prompts, num_seats, num_left = list[Prompt](), 0, num_tokens
        for request in dict.fromkeys([first, *islice(self._waiting.shortest(), _MOST_SHARING)]):
            if num_left <= 0 or not self._seats.fit(request, num_seats):
                break
            is_other = request.kind is not kind or request.request_id in late
            if is_other or self._forks.must_wait(request) or self._adapters.holds_up(request):
                continue
            hit = self._forks.find_prefix(request)
            if not self._cache.fits(request.num_tokens, hit):
                break
            num_missing = request.num_tokens - hit.num_tokens
            prompts.append((num_missing, request))
            num_seats += request.num_seats
            num_left -= self.shares.sure_of(num_missing, num_tokens) if request is head else num_missing
        return prompts

    def check(self, running: Collection[Request]) -> None:
        """Assert that only running requests are read."""
        assert self.reading.keys() <= set(running), "a request is read that does not run"
