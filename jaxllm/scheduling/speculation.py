"""Speculation: which requests' next tokens are guessed, and how many guesses a step checks.

Guesses become drafts, tokens at the end of a chunk, and a row is sampled before each of them. As a row's token depends
on its seed, its position and the tokens before it alone, a draft that is what its row samples is what a step of its own
would have sampled: the outputs are the same, to the bit where rows do not depend on their batch.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from functools import partial

from jaxllm.messages import SpeculationStats
from jaxllm.scheduling.kv_cache_manager import GroupBlocks, KVCacheManager
from jaxllm.scheduling.plan import Chunk
from jaxllm.scheduling.request import Request
from jaxllm.scheduling.step_draft import StepDraft
from jaxllm.speculation.drafter import SpeculationSettings, make_drafter
from jaxllm.speculation.guesses import Guesses

type CutDrafts = Callable[[str, int, array[int]], array[int]]
"""Returns the leading ones of a request's drafts that its rules let follow, and after which output goes on, given the
request's id and how many outputs it has."""

WAIT = 0.1
"""A step that is planned after the one before, not while it runs, takes at most so much longer, as a part."""


def keep_drafts(_request_id: str, _num_output_tokens: int, drafts: array[int]) -> array[int]:
    """Return all drafts of a request without rules."""
    return drafts


class Speculation:
    """Guess what running requests say next, and count what came of it."""

    def __init__(self, settings: SpeculationSettings, max_model_len: int) -> None:
        self._settings, self._max_model_len = settings, max_model_len
        self._drafter = make_drafter(settings)
        self._num_drafts, self._num_draft_tokens = 0, 0
        self._accepted_per_pos = [0] * settings.num_speculative_tokens

    def pays(self, running: Sequence[Request], most_rows: int) -> bool:
        """Say whether drafts would give more tokens than are lost if a step is planned only after the one before, when
        the tokens that drafts follow are known. A step has at most `most_rows` rows of logits.
        """
        gain, num_free = 0.0, most_rows - len(running)
        for request in running:
            count = min(self._num_worth(request, len(running)), num_free)
            if count > 0 and request.guesses is not None:
                gain += request.guesses.gain(count)
                num_free -= count
        return gain > WAIT * len(running)

    def add_drafts(self, draft: StepDraft, cache: KVCacheManager, cut: CutDrafts) -> None:
        """Give drafts to the requests of a step, out of what everybody has left of its tokens, rows and blocks."""
        draft.add_drafts(partial(self._drafts_after, draft, cache, cut))

    def _drafts_after(
        self, draft: StepDraft, cache: KVCacheManager, cut: CutDrafts, request: Request, chunk: Chunk, at_most: int
    ) -> tuple[array[int], GroupBlocks]:
        """Return at most so many drafts after a chunk of one token, and the blocks that hold them too."""
        none = array("i"), chunk.block_ids
        if chunk.previous_row is not None or not chunk.samples:
            return none
        num_left = request.most_tokens(self._max_model_len) - request.num_tokens
        count = min(self._num_worth(request, draft.num_planned), at_most, num_left - 1)
        if count <= 0 or request.guesses is None:
            return none
        drafts = cut(request.request_id, request.num_output_tokens, request.guesses.next_ids[:count])
        table = cache.tables[request.request_id]
        # The last blocks are for tokens that are certain.
        if not drafts or not cache.grow(table, request.num_tokens + len(drafts), spare=len(cache.tables)):
            return none
        return drafts, tuple([block_ids[:] for block_ids in table.block_ids])

    def record(self, request: Request, num_new: int, num_drafts: int) -> None:
        """Take in the request's new tokens, the last ones that it has."""
        if request.guesses is None:
            return
        request.guesses.compare(request.token_ids[-num_new:], request.num_tokens - num_new)
        if num_drafts:
            self._num_drafts += 1
            self._num_draft_tokens += num_drafts
            for place in range(num_new - 1):
                self._accepted_per_pos[place] += 1

    def end(self, request: Request) -> None:
        """Learn from a request that has ended."""
        if request.guesses is not None:
            self._drafter.learn(request.token_ids, request.num_prompt_tokens)

    def stats(self) -> SpeculationStats:
        """Return what was counted since the start."""
        return SpeculationStats(
            num_drafts=self._num_drafts,
            num_draft_tokens=self._num_draft_tokens,
            num_accepted_tokens=sum(self._accepted_per_pos),
            num_accepted_tokens_per_pos=list(self._accepted_per_pos),
        )

    def _num_worth(self, request: Request, num_rows: int) -> int:
        """Return how many drafts of the request pay in a step that has so many rows of tokens without them."""
        if not request.num_output_tokens:
            return 0  # its prompt, or what is pooled, is all certain
        if request.guesses is None:
            request.guesses = Guesses(self._drafter, self._settings.num_speculative_tokens)
        # A step of n rows takes n + free units of time and gives n tokens: a row more, which takes 1, should give as
        # much for it.
        return request.guesses.look(request.token_ids, num_rows / (num_rows + self._settings.num_free_rows))
