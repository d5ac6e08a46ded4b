"""Forks: requests that begin with the tokens of another request, their donor, and share its blocks."""

from __future__ import annotations

from collections.abc import Collection

from jaxllm.scheduling.cache.kv_cache_manager import KVCacheManager, PrefixHit
from jaxllm.scheduling.request import Request
from jaxllm.scheduling.request_queue import RequestQueue


class Forks:
    """Decide how long forks wait, which blocks they share, and how long a donor's blocks are kept."""

    def __init__(self, cache: KVCacheManager, waiting: RequestQueue) -> None:
        self._cache, self._waiting = cache, waiting

    def wants(self, donor: Request) -> bool:
        """Return whether an ended request's blocks may still be needed."""
        return donor.keeps_blocks or self._waiting.num_forks(donor) > 0

    def close_unwanted(self, donor: Request) -> None:
        """Close the donor's parked table if it is no longer needed."""
        if donor.finish_reason is not None and not self.wants(donor) and self._cache.table_of(donor) is not None:
            self._cache.close_parked(donor.request_id)

    def must_wait(self, request: Request) -> bool:
        """Return whether a fork should wait until its donor's prompt is planned in steps before this one."""
        donor = request.donor
        if donor is None or donor.finish_reason is not None or request.is_scored or donor.order > request.order:
            return False  # a fork ahead of its donor does not wait, since others may hold the donor up
        return self._num_donated(donor) < donor.num_prompt_tokens

    def find_prefix(self, request: Request) -> PrefixHit:
        """Return the longest prefix of a waiting request, from its donor or the cache."""
        donor = request.donor
        if donor is None:
            return self._cache.find_prefix(request, 0, takes_over=False)
        is_last = donor.finish_reason is not None and not donor.keeps_blocks and self._waiting.num_forks(donor) == 1
        return self._cache.find_prefix(request, self._num_donated(donor), takes_over=is_last)

    def give_up_parked(self, request: Request, spared: Collection[Request]) -> bool:
        """Close a parked table for a waiting request, its own donor's last; return False if there is none to close."""
        give_up = self._cache.give_up_parked
        if request.donor is None:
            return give_up(spared)
        return give_up({*spared, request.donor}) or give_up(spared)

    def _num_donated(self, donor: Request) -> int:
        """Return the number of the donor's tokens that are computed before this step runs."""
        table = self._cache.table_of(donor)
        if table is None:
            return 0
        return table.num_computed_tokens + donor.num_planned
