"""Draft by prompt lookup: repeat what followed an earlier occurrence of a request's last few tokens.

The method is of Saxena, "Prompt Lookup Decoding", 2023.
"""

from __future__ import annotations

from array import array

from jaxllm.utils.token_search import WIDTH, find_last


class NgramDrafter:
    """Find the longest n-gram at a request's end that occurred before, at its latest occurrence."""

    def __init__(self, least: int, most: int) -> None:
        """Look for n-grams of at least `least` and at most `most` tokens."""
        self._least, self._most = least, most

    def propose(self, token_ids: array[int], at_most: int) -> array[int]:
        """Return the tokens that followed the n-gram, repeated if they reach the request's end."""
        text, last = token_ids.tobytes(), len(token_ids) - 1
        after = None
        for size in range(self._least, min(self._most, last) + 1):
            start = find_last(text, text[-size * WIDTH :], last)
            if start is None:
                break  # so a longer one cannot exist
            after = start + size
        return array("i") if after is None else _repeat_from(token_ids, after, at_most)

    def learn(self, token_ids: array[int], num_prompt_tokens: int) -> None:
        """Do nothing: only a request's own tokens are searched."""


def _repeat_from(token_ids: array[int], start: int, count: int) -> array[int]:
    """Return `count` tokens from `start` on, starting over at `start` after the last one."""
    guess = token_ids[start : start + count]
    return (guess * -(-count // len(guess)))[:count]
