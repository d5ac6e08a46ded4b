"""Drafters guess what follows a request's tokens: by looking at tokens alone, or by a model, smaller than the one whose
tokens are guessed.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import Protocol

from jaxllm.speculation.ngram import NgramDrafter
from jaxllm.speculation.suffix import SuffixDrafter


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftModelLimits:
    """What the scheduler knows of a draft model."""

    max_num_batched_tokens: int
    """The most tokens of one of its steps."""
    max_model_len: int
    """The most tokens of a request of which it guesses more."""
    row_alignment: int
    """The alignment of longer chunks, as in SchedulerConfig."""
    group: int
    """The cache group of the other model whose block tables it shares, with as many blocks in a pool of its own."""
    num_groups: int
    """Its own cache groups, which all have that table."""
    vocab_size: int
    """The ids that the other model knows: it may know more."""
    shift: int = 0
    """1 for a draft head, which at position p takes the other model's features of p and the token at p + 1; 0 for draft
    models of other kinds, which take the token at p."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationSettings:
    """Settings of speculation, checked and settled."""

    method: str
    """The drafter: "ngram", "suffix", "draft_model", "mtp" or "eagle3"."""
    num_speculative_tokens: int
    """The most drafts of one request in a step."""
    num_free_rows: float
    """A step of so many rows of tokens takes twice as long as one of a single row, for which all weights are read."""
    prompt_lookup_min: int
    prompt_lookup_max: int
    """The fewest and the most tokens at the end of a request that its drafts must have followed before."""
    max_tree_depth: int
    """The most tokens at the end of a request that the suffix drafter looks for."""
    max_cached_requests: int
    """The answers of so many requests are searched for suffixes, besides the request's own tokens."""
    max_spec_factor: float
    """The suffix drafter's drafts are at most so many times as many as the tokens that were found."""
    min_token_prob: float
    """The suffix drafter's drafts followed in at least this part of the places."""
    draft_model: DraftModelLimits | None = None
    """The model that guesses; None if tokens alone are looked at."""


class Drafter(Protocol):
    """Guesses what follows some tokens from tokens alone."""

    def propose(self, token_ids: array[int], at_most: int) -> array[int]:
        """Return at most so many guesses of the next tokens; none where there is nothing to go by."""
        ...

    def learn(self, token_ids: array[int], num_prompt_tokens: int) -> None:
        """Take in the tokens of a request that has ended."""
        ...


def make_drafter(settings: SpeculationSettings) -> Drafter:
    """Return the drafter that the settings name."""
    if settings.method == "ngram":
        return NgramDrafter(settings.prompt_lookup_min, settings.prompt_lookup_max)
    return SuffixDrafter(
        settings.max_tree_depth,
        settings.max_cached_requests,
        factor=settings.max_spec_factor,
        least_share=settings.min_token_prob,
    )
