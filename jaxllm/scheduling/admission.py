"""Admission: the waiting request that starts next, and what the others wait for.

What a request waits for alone lets others pass it: its mask, its donor, blocks that come from a tier, a slot for its
adapter, a step of its kind. What every request needs stops them all, so that none takes it from the one before it: a
seat, blocks, room in the step.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import islice
from typing import NamedTuple

from jaxllm.scheduling.cache.kv_cache_manager import KVCacheManager, PrefixHit
from jaxllm.scheduling.cache.tiers import Tiers
from jaxllm.scheduling.forks import Forks
from jaxllm.scheduling.holdings import Holdings
from jaxllm.scheduling.plan import StepKind
from jaxllm.scheduling.prompts.line import PromptLine
from jaxllm.scheduling.prompts.shares import Prompt
from jaxllm.scheduling.request import Request
from jaxllm.scheduling.request_queue import RequestQueue
from jaxllm.scheduling.step_builder import StepBuilder

_MOST_SHARING = 16
"""The most waiting prompts that a step is shared among: the shortest."""


class Admitted(NamedTuple):
    """A request that starts in a step, with what others have computed of it and the size of its first chunk."""

    request: Request
    hit: PrefixHit
    num_tokens: int


class Admission:
    """Decide which waiting request starts next in a step, and what prompts in line may have of it."""

    def __init__(
        self,
        waiting: RequestQueue,
        prompts: PromptLine,
        cache: KVCacheManager,
        forks: Forks,
        tiers: Tiers,
        holdings: Holdings,
        *,
        cuts_prompts: bool,
    ) -> None:
        """Admit requests from `waiting`. A prompt needs a step that takes it whole unless a step `cuts_prompts`."""
        self._waiting, self._prompts, self._cache = waiting, prompts, cache
        self._forks, self._tiers = forks, tiers
        self._seats, self._adapters, self._clips = holdings.seats, holdings.adapters, holdings.clips
        self._cuts_prompts = cuts_prompts

    def next(self, step: StepBuilder, late: Collection[str], shares: Mapping[Request, int]) -> Admitted | None:
        """Return the request that starts next in a step, and set aside those that it passes; None if all must wait.

        Requests in `late` are not ready. `shares` has the most tokens of some requests' chunks.
        """
        while (request := self._first(step.kind)) is not None and self._seats.fit(request):
            if self._waits_alone(request, late):
                self._waiting.set_aside(request)
                continue
            if self._needs_other_step(request, step) or self._adapters.holds_up(request):
                # Later requests may fit this step; this one is at the head of another step.
                if not step.may_pass():
                    return None
                self._waiting.set_aside(request)
                continue
            hit = self._forks.find_prefix(request)
            if self._tiers.fetch(request, hit):
                self._waiting.set_aside(request)
                continue
            num_missing = request.num_tokens - hit.num_tokens
            if not self._cuts_prompts and num_missing > step.room(is_whole=True):
                return None
            # All its tokens must fit, not just the first chunk: half-read prompts would crowd each other out.
            if self._cache.fits(request.num_tokens, hit):
                num_new = self._first_chunk(request, hit, step, shares.get(request))
                return Admitted(request, hit, num_new) if num_new else None
            if not self._give_up_blocks(request, step):
                return None
        return None

    def _first(self, kind: StepKind) -> Request | None:
        """Return the waiting request whose turn it is: the first in line, or the shortest while another is read."""
        head = self._waiting.peek()
        if head is None or not self._prompts.shares.short_prompts_pass or not self._prompts.reads_before(head, kind):
            return head
        return next(self._waiting.shortest(), None)

    def _waits_alone(self, request: Request, late: Collection[str]) -> bool:
        """Return whether a request waits for what no other needs: its mask, its blocks on their way, or its donor."""
        return request.request_id in late or self._forks.must_wait(request)

    def _needs_other_step(self, request: Request, step: StepBuilder) -> bool:
        """Return whether a request waits for a step of another kind, or for one with room for all its tokens."""
        is_too_long = request.runs_whole and request.num_tokens > step.room(is_whole=True)
        return request.kind is not step.kind or is_too_long

    def _first_chunk(self, request: Request, hit: PrefixHit, step: StepBuilder, share: int | None) -> int:
        """Return the number of tokens of a request's first chunk; 0 if there is no room for its clip or its media."""
        if request.clip is not None and not self._clips.fits(request.clip):
            return 0
        num_missing = request.num_tokens - hit.num_tokens
        return step.limit(request, hit.num_tokens, num_missing, hit.num_shared_tokens, at_most=share)

    def _give_up_blocks(self, request: Request, step: StepBuilder) -> bool:
        """Free blocks that are kept for forks, or came for others that wait; return False if there are none."""
        return self._forks.give_up_parked(request, step.donors) or self._tiers.give_up(request)

    def share_out(self, step: StepBuilder, running: Collection[Request], late: Collection[str]) -> dict[Request, int]:
        """Return the most tokens of an empty step that some prompts may have, beside the next tokens of streams."""
        if not (self._prompts and self._prompts.shares.short_prompts_pass):
            return {}
        num_left = step.num_tokens - self._prompts.num_read(step.kind, running)
        num_tokens = max(1, min(step.num_prompt_tokens, num_left))
        waiting = self._candidates(step.kind, num_tokens, late)
        return self._prompts.share_out(step.kind, num_tokens, late, waiting)

    def _candidates(self, kind: StepKind, num_tokens: int, late: Collection[str]) -> list[Prompt]:
        """Return the waiting prompts that could start next, until they lack `num_tokens` tokens together.

        They come with the tokens that they lack.
        """
        head, first = self._waiting.peek(), self._first(kind)
        if first is None:
            return []
        prompts, num_seats, num_left = list[Prompt](), 0, num_tokens
        for request in dict.fromkeys([first, *islice(self._waiting.shortest(), _MOST_SHARING)]):
            if num_left <= 0 or not self._seats.fit(request, num_seats):
                break
            if request.kind is not kind or self._waits_alone(request, late) or self._adapters.holds_up(request):
                continue
            hit = self._forks.find_prefix(request)
            if not self._cache.fits(request.num_tokens, hit):
                break
            num_missing = request.num_tokens - hit.num_tokens
            prompts.append((num_missing, request))
            num_seats += request.num_seats
            num_left -= self._prompts.shares.sure_of(num_missing, num_tokens) if request is head else num_missing
        return prompts
