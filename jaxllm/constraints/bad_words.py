"""Words that must not be generated, as token sequences. The last token of a word is banned when the output ends with
the tokens before it. Prompt tokens do not count as the beginning of a word.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class BadWords:
    """The banned sequences of one request, indexed by their second-to-last token. Immutable."""

    def __init__(self, sequences: Iterable[Sequence[int]]) -> None:
        always: dict[int, None] = {}
        self._by_last: dict[int, list[tuple[list[int], int]]] = {}
        """The (prefix, token banned after it) pairs by the prefix's last token."""
        self.num_recent = 0
        """The number of last output tokens that `banned` needs; 0 if it depends on none."""
        for sequence in sequences:
            *prefix, banned = sequence
            if not prefix:
                always[banned] = None
                continue
            self._by_last.setdefault(prefix[-1], []).append((prefix, banned))
            self.num_recent = max(self.num_recent, len(prefix))
        self.always = tuple(always)
        """The words of one token, which are always banned."""

    def banned(self, output_ids: Sequence[int]) -> list[int]:
        """List the ids banned after this output (its last num_recent tokens suffice), besides `always`."""
        if not output_ids:
            return []
        words = self._by_last.get(output_ids[-1], ())
        return [banned for prefix, banned in words if list(output_ids[-len(prefix) :]) == prefix]
