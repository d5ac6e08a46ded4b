"""What running requests hold besides their blocks."""

from __future__ import annotations

from collections.abc import Callable, Collection

from jaxllm.scheduling.adapter_slots import AdapterSlots
from jaxllm.scheduling.clips import ClipCache
from jaxllm.scheduling.config import SchedulerConfig
from jaxllm.scheduling.media import MediaCache
from jaxllm.scheduling.plan import Owner
from jaxllm.scheduling.request import Request, needs_token_counts
from jaxllm.scheduling.seats import Seats
from jaxllm.scheduling.token_count_rows import TokenCountRows


class Holdings:
    """Seats, rows of token counts, slots of adapters, rows of media and blocks of clips.

    A request holds them from its admission until it ends or is preempted; media only while it reads them.
    """

    def __init__(self, config: SchedulerConfig, clock: Callable[[], float]) -> None:
        self._tracks_all_tokens = config.tracks_all_tokens
        self.seats = Seats(config.max_num_seqs, clock)
        self.adapters = AdapterSlots(config.num_adapter_slots, config.max_num_seqs)
        self.media = MediaCache(config.num_media_rows, sees_both_sides=config.sees_both_sides)
        self.clips = ClipCache(config.num_clip_blocks, config.clip_blocks)
        self._count_rows = TokenCountRows(config.max_num_seqs)

    def take(self, request: Request) -> None:
        """Give an admitted request what it holds while it runs; its owner names it."""
        self.seats.take(request)
        if self._counts_tokens(request):
            self._count_rows.take(request)
        self.adapters.take(request)
        request.owner = Owner(
            request_id=request.request_id,
            num_prompt_tokens=request.num_prompt_tokens,
            params=request.params,
            seed=request.source.seed,
            pooling=request.pooling,
            pair_start=request.source.pair_start,
            adapter_slot=self.adapters.slot_of(request),
            steered=request.source.steered,
            hidden_states=request.source.hidden_states,
            count_row=self._count_rows.by_request.get(request),
            clip_blocks=None if request.clip is None else self.clips.take(request.request_id, request.clip),
            token_ids=None if request.clip is None or request.keeps_blocks else request.token_ids,
        )

    def give_back(self, request: Request) -> None:
        """Give back what a request held that no longer runs."""
        self.seats.give_back(request)
        self._count_rows.release(request)
        self.adapters.give_back(request)
        self.media.release(request.request_id)
        self.clips.release(request.request_id)

    def _counts_tokens(self, request: Request) -> bool:
        """Return whether a running request has a row of the device's token counts."""
        return request.pooling is None and (self._tracks_all_tokens or needs_token_counts(request.params))

    def check(self, running: Collection[Request]) -> None:
        """Assert that the running requests hold what they need, and nobody else anything."""
        self.seats.check(running)
        self._count_rows.check([request for request in running if self._counts_tokens(request)])
        self.adapters.check(running)
        self.media.check({request.request_id for request in running})
        self.clips.check({request.request_id for request in running if request.clip is not None})
