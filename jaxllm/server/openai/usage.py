"""The token usage of a request in OpenAI's form."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from jaxllm.outputs import PoolingRequestOutput, RequestOutput


class PromptTokensDetails(msgspec.Struct, frozen=True):
    """Details of a prompt's tokens."""

    cached_tokens: int = 0
    """The number taken from the prefix cache."""
    created_cache_tokens: int | None = None
    """The number added to the prefix cache; None for pooled prompts."""
    multimodal_tokens: int | UnsetType = UNSET
    """The number that stand for images and videos; left out if there are none."""

    @classmethod
    def of(cls, output: RequestOutput | PoolingRequestOutput[Any]) -> PromptTokensDetails:
        """Return the details of an output's prompt."""
        ranges = (output.multi_modal_placeholders or {}).values()
        of_media = sum(tokens.length for of_modality in ranges for tokens in of_modality) or UNSET
        created = None if isinstance(output, PoolingRequestOutput) else output.num_cache_creation_tokens or 0
        return cls(output.num_cached_tokens or 0, created, of_media)

    @classmethod
    def sum(cls, details: Iterable[PromptTokensDetails]) -> PromptTokensDetails:
        """Return the sum over several prompts, which are all pooled, or none of them."""
        counts = list(details)
        created = [one.created_cache_tokens for one in counts if one.created_cache_tokens is not None]
        return cls(
            sum(one.cached_tokens for one in counts),
            sum(created) if created else None,
            sum(one.multimodal_tokens or 0 for one in counts) or UNSET,
        )


class CompletionTokensDetails(msgspec.Struct, frozen=True):
    """Details of an answer's tokens."""

    reasoning_tokens: int
    """The number of tokens in the reasoning's text."""


class UsageInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The tokens of a request, summed over its n outputs."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None
    """It is None unless the server was started with --enable-prompt-tokens-details."""
    completion_tokens_details: CompletionTokensDetails | None = None
    """It is None unless the server separates reasoning from the text."""


def make_usage(
    num_prompt_tokens: int,
    num_completion_tokens: int,
    prompt: PromptTokensDetails | None = None,
    num_reasoning_tokens: int | None = None,
) -> UsageInfo:
    """Return the usage. Pass `prompt` only if the server reports cached tokens."""
    return UsageInfo(
        prompt_tokens=num_prompt_tokens,
        total_tokens=num_prompt_tokens + num_completion_tokens,
        completion_tokens=num_completion_tokens,
        prompt_tokens_details=prompt,
        completion_tokens_details=None
        if num_reasoning_tokens is None
        else CompletionTokensDetails(min(num_reasoning_tokens, num_completion_tokens)),
    )
