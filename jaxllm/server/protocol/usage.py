"""How many tokens a request has taken, as OpenAI's clients read it."""

from __future__ import annotations

import msgspec


class PromptTokensDetails(msgspec.Struct, frozen=True):
    """What is known of a prompt's tokens beside their number."""

    cached_tokens: int
    """So many were taken from the prefix cache."""


class UsageInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The tokens of a request; those of all its n outputs count."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None
    """It is None unless the server was started with --enable-prompt-tokens-details."""


def make_usage(num_prompt_tokens: int, num_completion_tokens: int, num_cached_tokens: int | None = None) -> UsageInfo:
    """Return the usage; give `num_cached_tokens` only where the server tells of them."""
    return UsageInfo(
        prompt_tokens=num_prompt_tokens,
        total_tokens=num_prompt_tokens + num_completion_tokens,
        completion_tokens=num_completion_tokens,
        prompt_tokens_details=None if num_cached_tokens is None else PromptTokensDetails(num_cached_tokens),
    )
