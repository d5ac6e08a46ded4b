"""Track the guesses about one request: how many come true, and how many are worth a draft."""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Sequence

from jaxllm.speculation.drafter import Drafter

FIRST_RATE = 0.6
"""The share of guesses that is assumed to come true at first."""
_LAST_RATE = 0.995
"""The largest share that is assumed to come true."""
GAIN = 0.15
"""The weight of each guess in the rate."""
LEAST_RATE = 0.3
"""No draft that comes true less often pays, even if its row is free: with drafts, host and device wait for each other.
"""
SELDOM = 4
"""While no draft pays, guesses are compared only after this many tokens, to see whether they would come true."""

_NOTHING = array("i")


class Guesses(ABC):
    """The guesses about a request's next tokens, and the share of recent ones that came true."""

    __slots__ = ("_guessed_at", "_next_ids", "rate")

    def __init__(self, rate: float, num_tokens: int) -> None:
        self.rate = rate
        """The share of guesses that came true; guesses after a wrong one are not counted."""
        self._guessed_at = num_tokens
        self._next_ids = _NOTHING
        """The guesses about the tokens after the first `_guessed_at`."""

    @abstractmethod
    def look(self, token_ids: array[int], cost: float) -> int:
        """Return the number of drafts that are worth their cost after the request's tokens.

        `cost` is the time that a draft and its guess add to a step, divided by that of a token without drafts.
        """

    def gain(self, num_drafts: int, cost: float) -> float:
        """Return an estimate of the drafts that come true, less the tokens that could be computed in their time."""
        rate = min(self.rate, _LAST_RATE)
        return rate * (1 - rate**num_drafts) / (1 - rate) - num_drafts * cost

    def after(self, token_ids: array[int]) -> array[int]:
        """Return the guesses of what follows the request's tokens, empty if there are none yet."""
        return self._next_ids if self._guessed_at == len(token_ids) else _NOTHING

    def compare(self, new_ids: Sequence[int], num_tokens: int) -> None:
        """Compare the guesses with new tokens; the request had `num_tokens` tokens before them."""
        if self._guessed_at != num_tokens:
            return
        for guess, token_id in zip(self._next_ids, new_ids, strict=False):
            self.rate += GAIN * ((guess == token_id) - self.rate)
            if guess != token_id:
                break

    def _worth(self, cost: float, most: int, least: float = 0.0) -> int:
        """Return the number of drafts, at most `most`, that gives the most tokens in the same time; 0 if none gains.

        Even the last one comes true with a probability of at least `least`.
        """
        best, most_per_time, right, gained = 0, 1.0, 1.0, 1.0
        for count in range(1, most + 1):
            right *= min(self.rate, _LAST_RATE)  # a draft comes true only if all before it do
            gained += right
            if right < least or gained / (1 + count * cost) <= most_per_time:
                break
            best, most_per_time = count, gained / (1 + count * cost)
        return best


class TextGuesses(Guesses):
    """Guesses that are made from tokens alone, in negligible time."""

    __slots__ = ("_drafter", "_most")

    def __init__(self, drafter: Drafter, most: int) -> None:
        """Make at most `most` guesses at a time."""
        super().__init__(FIRST_RATE, 0)
        self._drafter, self._most = drafter, most

    def look(self, token_ids: array[int], cost: float) -> int:
        """Guess the next tokens, and return the number of guesses that are worth a draft."""
        count, num_tokens = self._worth(cost, self._most, LEAST_RATE), len(token_ids)
        if self._guessed_at != num_tokens:
            looks = count or num_tokens % SELDOM == 0
            self._next_ids = self._drafter.propose(token_ids, self._most) if looks else _NOTHING
            self._guessed_at = num_tokens
        return min(count, len(self._next_ids))


class ModelGuesses(Guesses):
    """Guesses that a draft model makes on request."""

    __slots__ = ("_most",)

    def __init__(self, most: int, rate: float, num_tokens: int) -> None:
        """Ask for at most `most` guesses at a time, about a request of `num_tokens` tokens.

        `rate` is the share of guesses about other requests that came true.
        """
        super().__init__(rate, num_tokens)
        self._most = most

    def look(self, token_ids: array[int], cost: float) -> int:
        """Return the number of guesses to ask for after these tokens, or of existing ones."""
        if made := len(self.after(token_ids)):
            return made
        return self._worth(cost, self._most)

    def num_unguessed(self, token_ids: array[int]) -> int:
        """Return the number of the request's tokens since the last guesses."""
        return len(token_ids) - self._guessed_at

    def take(self, next_ids: array[int], num_tokens: int) -> None:
        """Take the guesses of what follows the request's `num_tokens` tokens."""
        self._next_ids, self._guessed_at = next_ids, num_tokens
