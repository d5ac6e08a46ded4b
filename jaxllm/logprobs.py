"""Users see log-probabilities as vLLM's `Logprob`, in one of its two containers of positions."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, MutableSequence
from typing import Any, NoReturn, overload


@dataclasses.dataclass(slots=True)
class Logprob:
    """A token's log-probability at one position."""

    logprob: float
    rank: int | None = None
    """The token's place among all, from 1; for ids that were asked for, their place among those."""
    decoded_token: str | None = None
    """The token's text as it reads there: "" if it ends inside a character. It is None where nothing is detokenized."""


LogprobsOnePosition = dict[int, Logprob]
"""A position maps token ids to Logprobs: the token itself first, then the most likely ones, or those asked for."""


@dataclasses.dataclass
class FlatLogprobs(MutableSequence[LogprobsOnePosition]):
    """A list of positions that six long lists hold: position i is entries start_indices[i] to end_indices[i].

    It is for programs that would rather not have thousands of small dicts. It reads and grows as a list of them does,
    but no position can be changed.
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
        """Add a position from its columns, which all have one length."""
        self.start_indices.append(len(self.token_ids))
        self.token_ids.extend(token_ids)
        self.logprobs.extend(logprobs)
        self.ranks.extend(ranks)
        self.decoded_tokens.extend(decoded_tokens)
        self.end_indices.append(len(self.token_ids))

    def extend(self, values: Iterable[LogprobsOnePosition | None]) -> None:
        """Add positions; None adds one without entries."""
        if isinstance(values, FlatLogprobs):  # a token that is listed twice would be once in a dict
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
        """Refuse to insert: positions are only added at the end."""
        del index, value
        raise TypeError("positions can only be appended to FlatLogprobs")


SampleLogprobs = list[LogprobsOnePosition] | FlatLogprobs
"""An output has one position for each of its tokens."""
PromptLogprobs = list[LogprobsOnePosition | None] | FlatLogprobs
"""A prompt has one position for each of its tokens; the first token's has no entries."""
