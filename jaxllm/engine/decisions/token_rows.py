"""Score options exactly: the rows of log-probabilities that their token sequences need, each computed once.

An option's log-probability is the sum over its tokens, each after the prompt and the tokens before it. Options that
begin alike share rows: there is one row per distinct beginning, or several where more tokens follow it than a row may
name.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from jaxllm.params.limits import MAX_LOGPROB_TOKEN_IDS

type Tokens = tuple[int, ...]


class Row(NamedTuple):
    """The log-probabilities of some tokens that may follow a beginning of options."""

    path: Tokens
    """The tokens after the prompt; none in a first row."""
    next_ids: list[int]


class OptionTokens(NamedTuple):
    """The token sequences of each option."""

    sequences: list[list[Tokens]]
    """One or more per option. None begins with another one, so that they exclude each other."""

    def rows(self) -> list[Row]:
        """Return the rows that score all sequences, those without a path first, and shorter paths before longer."""
        followers: dict[Tokens, dict[int, None]] = {}
        for sequence in _flat(self.sequences):
            for i, token_id in enumerate(sequence):
                followers.setdefault(sequence[:i], {})[token_id] = None
        width = MAX_LOGPROB_TOKEN_IDS
        return [
            Row(path, list(ids)[start : start + width])
            for path, ids in sorted(followers.items(), key=lambda item: len(item[0]))
            for start in range(0, len(ids), width)
        ]

    def logprobs(self, table: Mapping[Tokens, Mapping[int, float]]) -> list[float]:
        """Return each option's log-probability, over all its sequences, from the rows' values by path."""
        return [
            logsumexp([math.fsum(table[tokens[:i]][tokens[i]] for i in range(len(tokens))) for tokens in sequences])
            for sequences in self.sequences
        ]

    @property
    def first_ids(self) -> set[int]:
        """Return the tokens that begin an option."""
        return {tokens[0] for tokens in _flat(self.sequences)}

    @property
    def longest(self) -> int:
        """Return the number of tokens of the longest sequence."""
        return max(map(len, _flat(self.sequences)))


def option_tokens(spellings: Sequence[Sequence[Sequence[int]]], end_id: int | None) -> OptionTokens | None:
    """Return the sequences of options from the tokens of their spellings.

    If one begins with another, all of them end with `end_id`: an option is then the whole answer, not its beginning.
    None if the options cannot be told apart: two are the same tokens, or they would need an end and there is none.
    """
    distinct = [list(dict.fromkeys(tuple(each) for each in option)) for option in spellings]
    flat = _flat(distinct)
    if len(set(flat)) < len(flat) or not all(flat):
        return None
    if _has_prefix(flat):
        if end_id is None:
            return None
        distinct = [[(*each, end_id) for each in option] for option in distinct]
    return OptionTokens(distinct)


def logsumexp(values: Sequence[float]) -> float:
    """Return the logarithm of the sum of exponentials; minus infinity for none, and for zeros alone."""
    top = max(values, default=-math.inf)
    return top if math.isinf(top) else top + math.log(math.fsum(math.exp(each - top) for each in values))


def _flat(sequences: Iterable[Iterable[Tokens]]) -> list[Tokens]:
    return [each for option in sequences for each in option]


def _has_prefix(sequences: Sequence[Tokens]) -> bool:
    """Return whether some sequence begins with another: then it follows one directly in sorted order."""
    ordered = sorted(sequences)
    return any(later[: len(earlier)] == earlier for earlier, later in itertools.pairwise(ordered))
