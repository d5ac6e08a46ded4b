"""Drafts by prompt lookup: what followed when a request's last few tokens came before.

The method is of Saxena, "Prompt Lookup Decoding", 2023.
"""

from __future__ import annotations

from array import array

from jaxllm.utils.token_search import WIDTH, find_last


class NgramDrafter:
    """Finds the longest of the request's last n-grams that came before, at its latest place."""

    def __init__(self, least: int, most: int) -> None:
        """Look for n-grams of at least `least` and at most `most` tokens."""
        self._least, self._most = least, most

    def propose(self, token_ids: array[int], at_most: int) -> array[int]:
        """Return what followed the n-gram, over and over where it goes on to the end."""
        text, last = token_ids.tobytes(), len(token_ids) - 1
        after = None
        for size in range(self._least, min(self._most, last) + 1):
            start = find_last(text, text[-size * WIDTH :], last)
            if start is None:
                break  # nor is a longer one there
            after = start + size
        return array("i") if after is None else repeat_from(token_ids, after, at_most)

    def learn(self, token_ids: array[int], num_prompt_tokens: int) -> None:
        """Forget the request: only its own tokens are searched."""


def repeat_from(token_ids: array[int], start: int, count: int) -> array[int]:
    """Return the `count` tokens from `start` on, which begin anew there when the last one is reached."""
    guess = token_ids[start : start + count]
    return (guess * -(-count // len(guess)))[:count]
