"""Find a mark that may have begun at the end of a text, which comes in pieces."""

from __future__ import annotations

from collections.abc import Iterable


def held_back(text: str, marks: Iterable[str]) -> int:
    """Return how many characters at the end of `text` may be the beginning of a mark."""
    longest = 0
    for mark in marks:
        for length in range(min(len(mark) - 1, len(text)), longest, -1):
            if text.endswith(mark[:length]):
                longest = length
                break
    return longest
