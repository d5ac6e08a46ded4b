"""How many tokens a request has taken, as OpenAI's clients read it."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from jaxllm.outputs import RequestOutput


class PromptTokensDetails(msgspec.Struct, frozen=True):
    """What is known of a prompt's tokens beside their number."""

    cached_tokens: int = 0
    """So many were taken from the prefix cache."""
    created_cache_tokens: int | None = None
    """So many others the prefix cache keeps from now on; None for prompts that are pooled."""

    @classmethod
    def of(cls, output: RequestOutput) -> PromptTokensDetails:
        """Return what an output says of its prompt."""
        return cls(output.num_cached_tokens or 0, output.num_cache_creation_tokens or 0)

    @classmethod
    def sum(cls, details: Iterable[PromptTokensDetails]) -> PromptTokensDetails:
        """Return what is known of several prompts together."""
        counts = list(details)
        return cls(sum(one.cached_tokens for one in counts), sum(one.created_cache_tokens or 0 for one in counts))


class CompletionTokensDetails(msgspec.Struct, frozen=True):
    """What is known of an answer's tokens beside their number."""

    reasoning_tokens: int
    """So many tokens the text of the reasoning has."""


class UsageInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The tokens of a request; those of all its n outputs count."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None
    """It is None unless the server was started with --enable-prompt-tokens-details."""
    completion_tokens_details: CompletionTokensDetails | None = None
    """It is None unless the model's answers may have reasoning that is told from their text."""


def make_usage(
    num_prompt_tokens: int,
    num_completion_tokens: int,
    prompt: PromptTokensDetails | None = None,
    num_reasoning_tokens: int | None = None,
) -> UsageInfo:
    """Return the usage; give `prompt` only where the server tells of the cache."""
    return UsageInfo(
        prompt_tokens=num_prompt_tokens,
        total_tokens=num_prompt_tokens + num_completion_tokens,
        completion_tokens=num_completion_tokens,
        prompt_tokens_details=prompt,
        completion_tokens_details=None
        if num_reasoning_tokens is None
        else CompletionTokensDetails(min(num_reasoning_tokens, num_completion_tokens)),
    )
