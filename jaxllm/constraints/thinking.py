"""Limit the number of tokens that a model spends in a thinking section before it is forced to close it.

A section opens with the start sequence and closes with the end sequence, anywhere in the prompt or the output; each
section has the whole budget. Tokens of an open section in the prompt count.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from jaxllm.text.reasoning import ThinkingTokens
from jaxllm.utils.token_search import find_last


class ThinkingState:
    """Tracks the thinking sections of one sequence, by its tokens alone. No budget means no limit."""

    __slots__ = ("_budget", "_last_end", "_last_start", "_num_outputs", "_num_tokens", "_recent", "_tokens")

    def __init__(self, tokens: ThinkingTokens, prompt_token_ids: Sequence[int], budget: int | None) -> None:
        self._tokens = tokens
        self._budget = budget
        self._num_tokens = len(prompt_token_ids)
        self._num_outputs = 0
        self._last_start = _last_position(prompt_token_ids, tokens.start_ids)
        self._last_end = _last_position(prompt_token_ids, tokens.end_ids)
        """The positions where the last start and the last end sequence begin; None if there is none."""
        kept = max(len(tokens.start_ids), len(tokens.end_ids))
        self._recent = tuple(prompt_token_ids[-kept:])
        """The last tokens, as many as the longer of the two sequences has."""

    @property
    def is_open(self) -> bool:
        """Return whether the next token is part of a thinking section."""
        return self._last_start is not None and (self._last_end is None or self._last_start > self._last_end)

    @property
    def forced_token_id(self) -> int | None:
        """The only token that may follow; None if the budget leaves the choice free."""
        if self._budget is None or self._last_start is None or not self.is_open:
            return None
        end_ids = self._tokens.end_ids
        if self._num_tokens - self._last_start - len(self._tokens.start_ids) < self._budget:
            return None
        for num_done in range(min(len(end_ids) - 1, self._num_outputs), 0, -1):
            if self._recent[-num_done:] == end_ids[:num_done]:
                return end_ids[num_done]
        return end_ids[0]

    def accept(self, token_id: int) -> None:
        """Append an output token."""
        start_ids, end_ids = self._tokens.start_ids, self._tokens.end_ids
        self._num_tokens += 1
        self._num_outputs += 1
        self._recent = (*self._recent, token_id)[-max(len(start_ids), len(end_ids)) :]
        if self._recent[-len(start_ids) :] == start_ids:
            self._last_start = self._num_tokens - len(start_ids)
        if self._recent[-len(end_ids) :] == end_ids:
            self._last_end = self._num_tokens - len(end_ids)


def _last_position(token_ids: Sequence[int], sequence: Sequence[int]) -> int | None:
    return find_last(array("i", token_ids).tobytes(), array("i", sequence).tobytes())
