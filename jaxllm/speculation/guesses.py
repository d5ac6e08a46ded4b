"""The guesses about one request, how many of them came true, and how many are worth a draft."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence

from jaxllm.speculation.drafter import Drafter

FIRST_RATE = 0.6
"""The part of guesses that is taken to come true before any has."""
LAST_RATE = 0.995
"""No more than this part is taken to come true."""
GAIN = 0.15
"""How much of the rate each guess decides."""
LEAST_RATE = 0.3
"""Below this rate no draft pays, however little its row costs: with drafts host and device wait for each other."""
SELDOM = 4
"""While no draft pays, guesses are made only after every so many tokens, to see whether they would come true."""

NOTHING = array("i")


class Guesses:
    """Guess what follows a request's tokens, and compare with what does."""

    __slots__ = ("_drafter", "_guessed_at", "_most", "_rate", "next_ids")

    def __init__(self, drafter: Drafter, most: int) -> None:
        """Make at most `most` guesses at a time."""
        self._drafter, self._most = drafter, most
        self._rate = FIRST_RATE
        self._guessed_at = 0
        self.next_ids = NOTHING
        """The guesses of what follows the tokens that were last looked at."""

    def look(self, token_ids: array[int], share: float) -> int:
        """Guess what follows the request's tokens; return how many of the guesses are worth a draft.

        `share` is the least probability with which a draft must come true to be worth its cost.
        """
        count, num_tokens = self._worth(share), len(token_ids)
        if self._guessed_at != num_tokens:
            looks = count or num_tokens % SELDOM == 0
            self.next_ids = self._drafter.propose(token_ids, self._most) if looks else NOTHING
            self._guessed_at = num_tokens
        return min(count, len(self.next_ids))

    def gain(self, num_drafts: int) -> float:
        """Return how many of so many drafts will come true, at a guess."""
        rate = min(self._rate, LAST_RATE)
        return rate * (1 - rate**num_drafts) / (1 - rate)

    def compare(self, new_ids: Sequence[int], num_tokens: int) -> None:
        """Compare the guesses with the tokens that have come; the request had `num_tokens` tokens before them."""
        if self._guessed_at != num_tokens:
            return
        for guess, token_id in zip(self.next_ids, new_ids, strict=False):
            self._rate += GAIN * ((guess == token_id) - self._rate)
            if guess != token_id:
                break

    def _worth(self, share: float) -> int:
        """Return the most drafts that pay: one comes true only if all before it do."""
        least, rate = max(share, LEAST_RATE), min(self._rate, LAST_RATE)
        return 0 if rate < least else max(1, int(math.log(least) / math.log(rate)))
