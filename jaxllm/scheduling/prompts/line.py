"""The prompts in line: the ones being read, the ones that wait, and what they may have of a step."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from jaxllm.scheduling.cache.kv_cache_manager import KVCacheManager
from jaxllm.scheduling.plan import StepKind
from jaxllm.scheduling.prompts.shares import Prompt, PromptShares, order_of_prompt
from jaxllm.scheduling.request import Request
from jaxllm.scheduling.request_queue import RequestQueue


class PromptLine:
    """Know the prompts that are being read, and decide how the prompts in line share a step."""

    def __init__(self, shares: PromptShares, cache: KVCacheManager, waiting: RequestQueue) -> None:
        self.shares = shares
        self._cache, self._waiting = cache, waiting
        self.reading: dict[Request, None] = {}
        """The running requests whose last chunk is not planned yet, in no order."""

    def __bool__(self) -> bool:
        """Return whether any prompt is being read or waits."""
        return bool(self.reading or len(self._waiting))

    def num_in_line(self, num_free_seats: int) -> int:
        """Return the number of prompts that are read, and of those that wait for nothing but their turn."""
        return len(self.reading) + min(len(self._waiting), num_free_seats)

    def num_read(self, kind: StepKind, running: Collection[Request]) -> int:
        """Return the number of running requests of a kind whose prompts are planned to their ends."""
        return sum(request.kind is kind for request in running) - sum(request.kind is kind for request in self.reading)

    def reads_before(self, request: Request, kind: StepKind) -> bool:
        """Return whether a prompt of a kind is being read that is before a waiting request in line."""
        return any(other.order < request.order for other in self.reading if other.kind is kind)

    def share_out(
        self, kind: StepKind, num_tokens: int, late: Collection[str], waiting: Sequence[Prompt]
    ) -> dict[Request, int]:
        """Return the most of a step's `num_tokens` tokens that prompts being read, and the first in line, may have.

        Short prompts pass. Other prompts of `waiting`, which could be admitted next, may have all that is left: they
        are admitted the shortest first. Requests in `late` have no part.
        """
        reading = [request for request in self.reading if request.kind is kind and request.request_id not in late]
        prompts = [(request.num_tokens - self.num_planned(request), request) for request in reading] + [*waiting]
        if len(prompts) < 2:
            return {}
        shares, first = self.shares.share_out(num_tokens, prompts), min(prompts, key=order_of_prompt)[1]
        return {request: shares[request] for request in {*reading, first}}

    def num_planned(self, request: Request) -> int:
        """Return the number of a running request's tokens that are computed before the next step."""
        return self._cache.tables[request.request_id].num_computed_tokens + request.num_planned

    def check(self, running: Collection[Request]) -> None:
        """Assert that only running requests are read."""
        assert self.reading.keys() <= set(running), "a request is read that does not run"
