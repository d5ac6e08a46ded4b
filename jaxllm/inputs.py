"""The forms of a prompt besides plain text and token ids: dicts of one of the types below."""

from __future__ import annotations

from typing import NotRequired, TypedDict


class TextPrompt(TypedDict):
    """A prompt as text."""

    prompt: str
    cache_salt: NotRequired[str]
    """Only requests with the same salt share prefix-cache blocks."""


class TokensPrompt(TypedDict):
    """A prompt as token ids."""

    prompt_token_ids: list[int]
    prompt: NotRequired[str]
    """The text of the ids, passed through to the output."""
    token_type_ids: NotRequired[list[int]]
    """For models that accept pairs: 0 for each token of the first text, 1 for each of the second."""
    cache_salt: NotRequired[str]
    """Only requests with the same salt share prefix-cache blocks."""


class TextPairPrompt(TypedDict):
    """A prompt of two texts for cross-encoders; the tokenizer joins them as a pair."""

    prompt: str
    text_pair: str


PromptType = str | list[int] | TextPrompt | TokensPrompt | TextPairPrompt
