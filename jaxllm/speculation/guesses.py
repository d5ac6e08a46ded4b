"""The guesses about one request, how many of them came true, and how many are worth a draft."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
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
"""While no draft pays, tokens are looked at only after every so many, to see whether guesses would come true."""

NOTHING = array("i")


class Guesses(ABC):
    """The guesses of what follows a request's tokens, and the part of them that came true of late."""

    __slots__ = ("_guessed_at", "_next_ids", "rate")

    def __init__(self, rate: float, num_tokens: int) -> None:
        self.rate = rate
        """The part of guesses that came true; those after a wrong one are not counted."""
        self._guessed_at = num_tokens
        self._next_ids = NOTHING
        """The guesses of what follows so many tokens."""

    @abstractmethod
    def look(self, token_ids: array[int], cost: float) -> int:
        """Return how many drafts are worth what they cost after these tokens, the request's.

        `cost` is what a draft takes, its guess counted, over what a token takes without drafts.
        """

    @abstractmethod
    def gain(self, num_drafts: int, cost: float) -> float:
        """Return how many tokens more so many drafts will give than without them, in the same time, at a guess."""

    def after(self, token_ids: array[int]) -> array[int]:
        """Return the guesses of what follows these tokens, the request's; none if there are none yet."""
        return self._next_ids if self._guessed_at == len(token_ids) else NOTHING

    def compare(self, new_ids: Sequence[int], num_tokens: int) -> None:
        """Compare the guesses with the tokens that have come; the request had `num_tokens` tokens before them."""
        if self._guessed_at != num_tokens:
            return
        for guess, token_id in zip(self._next_ids, new_ids, strict=False):
            self.rate += GAIN * ((guess == token_id) - self.rate)
            if guess != token_id:
                break

    def _num_right(self, num_drafts: int) -> float:
        """Return how many of so many drafts will come true, at a guess: one does only if all before it do."""
        rate = min(self.rate, LAST_RATE)
        return rate * (1 - rate**num_drafts) / (1 - rate)


class TextGuesses(Guesses):
    """Guesses that are made from tokens alone, which takes no time to speak of."""

    __slots__ = ("_drafter", "_most")

    def __init__(self, drafter: Drafter, most: int) -> None:
        """Make at most `most` guesses at a time."""
        super().__init__(FIRST_RATE, 0)
        self._drafter, self._most = drafter, most

    def look(self, token_ids: array[int], cost: float) -> int:
        """Guess what follows, and return how many of the guesses are worth a draft."""
        count, num_tokens = self._worth(cost), len(token_ids)
        if self._guessed_at != num_tokens:
            looks = count or num_tokens % SELDOM == 0
            self._next_ids = self._drafter.propose(token_ids, self._most) if looks else NOTHING
            self._guessed_at = num_tokens
        return min(count, len(self._next_ids))

    def gain(self, num_drafts: int, cost: float) -> float:
        """Return how many of so many drafts will come true; their rows are next to free if they are few."""
        del cost
        return self._num_right(num_drafts)

    def _worth(self, cost: float) -> int:
        """Return the most drafts of which each comes true with a probability that is no less than its cost."""
        least, rate = max(cost, LEAST_RATE), min(self.rate, LAST_RATE)
        return 0 if rate < least else max(1, int(math.log(least) / math.log(rate)))


class ModelGuesses(Guesses):
    """Guesses that a draft model is asked for."""

    __slots__ = ("_most",)

    def __init__(self, most: int, rate: float, num_tokens: int) -> None:
        """Ask for at most `most` guesses at a time. The request has so many tokens; guesses about others came true at
        this rate.
        """
        super().__init__(rate, num_tokens)
        self._most = most

    def look(self, token_ids: array[int], cost: float) -> int:
        """Return how many guesses to ask for after these tokens, or how many there are, if it was done."""
        if made := len(self.after(token_ids)):
            return made
        return self._worth(cost)

    def num_unguessed(self, token_ids: array[int]) -> int:
        """Return how many of the last tokens, the request's, have come since it was asked."""
        return len(token_ids) - self._guessed_at

    def take(self, next_ids: array[int], num_tokens: int) -> None:
        """Take the guesses of what follows the request's tokens, which are so many."""
        self._next_ids, self._guessed_at = next_ids, num_tokens

    def gain(self, num_drafts: int, cost: float) -> float:
        """Return how many of so many drafts will come true, less what could be had in the time that they take."""
        return self._num_right(num_drafts) - num_drafts * cost

    def _worth(self, cost: float) -> int:
        """Return how many drafts give the most tokens in the same time; 0 if none give more than there are without."""
        best, most_per_time, right, gained = 0, 1.0, 1.0, 1.0
        for count in range(1, self._most + 1):
            right *= min(self.rate, LAST_RATE)
            gained += right
            if gained / (1 + count * cost) <= most_per_time:
                break
            best, most_per_time = count, gained / (1 + count * cost)
        return best
