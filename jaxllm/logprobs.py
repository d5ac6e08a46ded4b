"""Log-probabilities for users: vLLM's `Logprob`, and its two containers of positions."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, MutableSequence
from typing import Any, NoReturn, overload


@dataclasses.dataclass(slots=True)
class Logprob:
    """A token's log-probability at one position."""

    logprob: float
    rank: int | None = None
    """The token's rank among all tokens, from 1; for requested ids, the rank among those."""
    decoded_token: str | None = None
    """The token's text in context: "" if it ends inside a character; None without detokenization."""


LogprobsOnePosition = dict[int, Logprob]
"""A position maps token ids to Logprobs: the token itself first, then the most likely ones or the requested ones."""


@dataclasses.dataclass
class FlatLogprobs(MutableSequence[LogprobsOnePosition]):
    """A list of positions stored in six long lists: position i has the entries start_indices[i] to end_indices[i].

    It avoids thousands of small dicts. It is read and extended like a list of dicts, but a position cannot be changed.
    """

    start_indices: list[int] = dataclasses.field(default_factory=list)
    end_indices: list[int] = dataclasses.field(default_factory=list)
    token_ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    ranks: list[int | None] = dataclasses.field(default_factory=list)
    decoded_tokens: list[str | None] = dataclasses.field(default_factory=list)

    def append(self, value: LogprobsOnePosition | None) -> None:
        """Add a position; None adds one without entries."""
        entries = (value or {}).values()
        self.append_fast(
            list(value or ()),
            [entry.logprob for entry in entries],
            [entry.rank for entry in entries],
            [entry.decoded_token for entry in entries],
        )

    def append_fast(
        self,
        token_ids: Iterable[int],
        logprobs: Iterable[float],
        ranks: Iterable[int | None],
        decoded_tokens: Iterable[str | None],
    ) -> None:
        """Add a position from its columns, all of one length."""
        self.start_indices.append(len(self.token_ids))
        self.token_ids.extend(token_ids)
        self.logprobs.extend(logprobs)
        self.ranks.extend(ranks)
        self.decoded_tokens.extend(decoded_tokens)
        self.end_indices.append(len(self.token_ids))

    def extend(self, values: Iterable[LogprobsOnePosition | None]) -> None:
        """Add positions; None adds one without entries."""
        if isinstance(values, FlatLogprobs):  # a dict would hold a token once that is listed twice
            for start, end in zip(values.start_indices, values.end_indices, strict=True):
                one = slice(start, end)
                columns = values.token_ids[one], values.logprobs[one], values.ranks[one], values.decoded_tokens[one]
                self.append_fast(*columns)
            return
        for value in values:
            self.append(value)

    def __len__(self) -> int:
        return len(self.start_indices)

    @overload
    def __getitem__(self, index: int) -> LogprobsOnePosition: ...

    @overload
    def __getitem__(self, index: slice) -> FlatLogprobs: ...

    def __getitem__(self, index: int | slice) -> LogprobsOnePosition | FlatLogprobs:
        if isinstance(index, slice):
            chosen = FlatLogprobs()
            for start, end in zip(self.start_indices[index], self.end_indices[index], strict=True):
                one = slice(start, end)
                chosen.append_fast(self.token_ids[one], self.logprobs[one], self.ranks[one], self.decoded_tokens[one])
            return chosen
        return {
            self.token_ids[i]: Logprob(self.logprobs[i], self.ranks[i], self.decoded_tokens[i])
            for i in range(self.start_indices[index], self.end_indices[index])
        }

    def __setitem__(self, index: Any, value: Any) -> NoReturn:
        raise TypeError("positions of FlatLogprobs cannot be replaced")

    def __delitem__(self, index: Any) -> NoReturn:
        raise TypeError("positions of FlatLogprobs cannot be deleted")

    def insert(self, index: int, value: Any) -> NoReturn:
        """Raise an error: positions can only be added at the end."""
        del index, value
        raise TypeError("positions can only be appended to FlatLogprobs")


SampleLogprobs = list[LogprobsOnePosition] | FlatLogprobs
"""One position for each token of an output."""
PromptLogprobs = list[LogprobsOnePosition | None] | FlatLogprobs
"""One position for each token of a prompt; the first token's has no entries."""
