"""Find where a model's reasoning begins and ends, by its marker tokens."""

from __future__ import annotations

from dataclasses import dataclass

from jaxllm.exceptions import VLLMValidationError
from jaxllm.text.tokenizer import Tokenizer

_COMMON_MARKERS = ("<think>", "</think>")


@dataclass(frozen=True, slots=True)
class ThinkingTokens:
    """The token sequences that open and close a thinking section; neither may be empty."""

    start_ids: tuple[int, ...]
    end_ids: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.start_ids or not self.end_ids:
            raise ValueError("the sequences that start and end reasoning must have at least one token each")


def thinking_tokens(markers: tuple[str, str] | None, tokenizer: Tokenizer | None) -> ThinkingTokens | None:
    """Return the tokens of the two markers; without markers, those of <think> and </think> if each is one token.

    None without such tokens. Raises VLLMValidationError for markers that make no tokens.
    """
    if markers is None:
        ids = {} if tokenizer is None else {text: token_id for token_id, text in tokenizer.added_tokens.items()}
        start, end = (ids.get(text) for text in _COMMON_MARKERS)
        return None if start is None or end is None else ThinkingTokens((start,), (end,))
    if tokenizer is None:
        message = "reasoning_config needs a tokenizer; leave it out with skip_tokenizer_init=True."
        raise VLLMValidationError(message, parameter="reasoning_config", value=markers)
    start_ids, end_ids = tokenizer.encode(markers, add_special_tokens=False)
    if not start_ids or not end_ids:
        message = f"reasoning_config: {markers[0]!r} or {markers[1]!r} makes no token of this tokenizer."
        raise VLLMValidationError(message, parameter="reasoning_config", value=markers)
    return ThinkingTokens(tuple(start_ids), tuple(end_ids))
