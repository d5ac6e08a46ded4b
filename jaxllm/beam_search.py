"""The results of `LLM.beam_search`, under vLLM's names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jaxllm.logprobs import Logprob


@dataclass
class BeamSearchSequence:
    """One of the sequences that a search found."""

    orig_prompt: dict[str, Any]
    """The prompt as `prompt_token_ids`, with its `prompt` and `cache_salt` if it has them."""
    tokens: list[int]
    """The prompt's tokens, then the generated ones, with the end of sequence if it ended them."""
    logprobs: list[dict[int, Logprob]]
    """The most likely tokens at the position of each generated token."""
    lora_request: Any | None = None
    cum_logprob: float = 0.0
    """The sum of the generated tokens' log-probabilities.

    The sequence's score is this sum divided by its number of tokens to the power of `length_penalty`. The prompt's
    tokens count; a final end of sequence does not.
    """
    text: str | None = None
    """The text of all tokens, the prompt's too; special tokens are in it only if `skip_special_tokens` is False."""
    finish_reason: str | None = None
    """How the sequence ended: "stop" at an end of sequence or of its grammar, "length", or "abort"."""
    stop_reason: int | str | None = None
    """The token id of the end of sequence, if that ended the sequence."""


@dataclass
class BeamSearchOutput:
    """The sequences that a search found for one prompt."""

    sequences: list[BeamSearchSequence]
    """The best sequences, best first: as many as the beam is wide, unless fewer are possible."""
