"""Make drafters, which guess the next tokens of a request from its tokens alone, and describe draft models."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import Protocol

from jaxllm.speculation.ngram import NgramDrafter
from jaxllm.speculation.suffix import SuffixDrafter


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftModelLimits:
    """The limits of a draft model, for the scheduler."""

    max_num_batched_tokens: int
    """The most tokens of one step."""
    max_model_len: int
    """The longest request that it guesses for, in tokens."""
    row_alignment: int
    """The alignment of longer chunks, as in SchedulerConfig."""
    group: int
    """The model's cache group whose block tables it shares; its own pool has the same number of blocks."""
    num_groups: int
    """The number of its own cache groups, which all use that table."""
    vocab_size: int
    """The model's vocabulary size; the draft model's may be larger."""
    shift: int = 0
    """1 for a draft head, which at position p takes the model's features of p and the token at p + 1; 0 for other draft
    models, which take the token at p."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationSettings:
    """The checked and settled settings of speculation."""

    method: str
    """The drafter: "ngram", "suffix", "draft_model", "mtp" or "eagle3"."""
    num_speculative_tokens: int
    """The most drafts of one request in a step."""
    num_free_rows: float
    """The number of rows with which a step takes twice as long as with one row, when all weights are read."""
    prompt_lookup_min: int
    prompt_lookup_max: int
    """The fewest and the most tokens at the end of a request that must have come before."""
    max_tree_depth: int
    """The most tokens at the end of a request that the suffix drafter looks for."""
    max_cached_requests: int
    """The number of past answers that are searched for suffixes, besides the request's own tokens."""
    max_spec_factor: float
    """The most drafts of the suffix drafter, as a multiple of the matching tokens."""
    min_token_prob: float
    """The least share of the matches that a draft of the suffix drafter must have followed in."""
    draft_model: DraftModelLimits | None = None
    """The model that guesses; None if guesses come from tokens alone."""


class Drafter(Protocol):
    """A drafter, which guesses the next tokens from tokens alone."""

    def propose(self, token_ids: array[int], at_most: int) -> array[int]:
        """Return at most `at_most` guesses of the next tokens; none if nothing matches."""
        ...

    def learn(self, token_ids: array[int], num_prompt_tokens: int) -> None:
        """Learn from the tokens of a request that has ended."""
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
