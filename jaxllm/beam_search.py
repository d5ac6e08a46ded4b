"""What `LLM.beam_search` returns, under vLLM's names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jaxllm.logprobs import Logprob


@dataclass
class BeamSearchSequence:
    """One of the sequences that a search found."""

    orig_prompt: dict[str, Any]
    """The prompt: its `prompt_token_ids`, and `prompt` and `cache_salt` where it has them."""
    tokens: list[int]
    """The prompt's tokens, then the generated ones, with the end of sequence if that ended them."""
    logprobs: list[dict[int, Logprob]]
    """Per generated token, the most likely ones at its place."""
    lora_request: Any | None = None
    cum_logprob: float = 0.0
    """Sum over the generated tokens. The score is this, divided by their number to the power of length_penalty."""
    text: str | None = None
    """All tokens as text, special ones too; an end of sequence only with include_stop_str_in_output."""
    finish_reason: str | None = None
    """"stop" at an end of sequence, else "length"."""
    stop_reason: int | str | None = None
    """The end of sequence's token id."""


@dataclass
class BeamSearchOutput:
    """What a search found for one prompt."""

    sequences: list[BeamSearchSequence]
    """As many as the beam's width, best first."""
