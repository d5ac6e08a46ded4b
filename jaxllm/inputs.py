"""A prompt is text, token ids, or a dict of one of the two forms below."""

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
    cache_salt: NotRequired[str]
    """Only requests with the same salt share prefix-cache blocks."""


PromptType = str | list[int] | TextPrompt | TokensPrompt
