"""The types of text completions: the request, the answer, and the events of a stream."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from jaxllm.exceptions import VLLMValidationError
from jaxllm.params.checks import INT32_MAX, check_int
from jaxllm.params.limits import MAX_N
from jaxllm.server.openai.logprobs import CompletionLogprobs, PromptTokenLogprob
from jaxllm.server.openai.prompt_fields import MAX_PROMPTS, several_prompts
from jaxllm.server.openai.sampling_fields import REFUSED, SamplingFields
from jaxllm.server.openai.usage import UsageInfo

COMPLETION_REFUSED: Mapping[str, str] = {
    **{name: reason for name, reason in REFUSED.items() if name != "prompt_embeds"},
    "suffix": "models here go on from a text, and fill no gaps",
    "max_completion_tokens": "use max_tokens",
    "messages": "use /v1/chat/completions",
    **dict.fromkeys(("mm_processor_kwargs", "media_io_kwargs"), "prompts are texts or token ids; leave it out"),
}
"""Fields that are refused: they would change the answer and are not supported."""


class CompletionRequest(SamplingFields, kw_only=True):
    """The request of `/v1/completions`: OpenAI's fields and vLLM's."""

    prompt: str | list[str | int | list[int]] | None = None
    """A text, its token ids, or a list of either; without it, `prompt_embeds` are the prompts."""
    prompt_embeds: str | list[str] | None = None
    """Embeddings of prompts, which come before `prompt`: a safetensors or .npy file in base64, or a list of such."""
    max_tokens: int | None = 16
    logprobs: int | None = None
    echo: bool = False
    """Begin each answer with its prompt; with max_tokens=0 that is all of it."""
    add_special_tokens: bool | None = True

    def check(self) -> None:
        """Check the fields before any work is done. Raises VLLMValidationError."""
        self.check_fields()
        if self.max_tokens is not None:
            check_int("max_tokens", self.max_tokens, 0 if self.echo else 1, INT32_MAX)
        if self.use_beam_search:
            message = "use_beam_search is not supported here: use /v1/chat/completions."
            raise VLLMValidationError(message, parameter="use_beam_search", value=True)
        if self.echo and self._embeds:
            message = "echo repeats a prompt's text, and prompt_embeds have none: leave it out."
            raise VLLMValidationError(message, parameter="echo", value=True)
        if self.logprob_token_ids and self.only_scores:
            message = "logprob_token_ids are scored at new tokens: leave them out, or ask for max_tokens above 0."
            raise VLLMValidationError(message, parameter="logprob_token_ids", value=self.logprob_token_ids)

    def prompts(self) -> list[dict[str, Any]]:
        """Return the prompts as the engine takes them, those of embeddings first.

        Raises VLLMValidationError for a request without any, with too many, or with others than texts and token ids.
        """
        of_embeds = self._embeds
        if self.prompt is None and not of_embeds:
            raise VLLMValidationError("prompt is required, or prompt_embeds.", parameter="prompt")
        others = [] if self.prompt is None else several_prompts("prompt", self.prompt)
        if len(of_embeds) + len(others) > MAX_PROMPTS:
            message = f"prompt and prompt_embeds are at most {MAX_PROMPTS} prompts, got {len(of_embeds) + len(others)}."
            raise VLLMValidationError(message, parameter="prompt")
        salt = {} if self.cache_salt is None else {"cache_salt": self.cache_salt}
        named: list[dict[str, Any]] = [{"prompt_embeds": each} for each in of_embeds]
        named += [{"prompt" if isinstance(each, str) else "prompt_token_ids": each} for each in others]
        return [prompt | salt for prompt in named]

    @property
    def _embeds(self) -> list[str]:
        """Return the prompts that are embeddings. Raises VLLMValidationError for too many."""
        return [] if self.prompt_embeds in (None, []) else several_prompts("prompt_embeds", self.prompt_embeds)

    def num_sequences(self, num_prompts: int) -> int:
        """Return the total number of sequences. Raises VLLMValidationError for more than one prompt may have."""
        n = 1 if self.n is None else check_int("n", self.n, 1, MAX_N)
        if num_prompts * n > MAX_N:
            message = (
                f"n={n} for each of {num_prompts} prompts makes more than {MAX_N} answers: send fewer prompts at once"
            )
            raise VLLMValidationError(f"{message}, or a smaller n.", parameter="n", value=n)
        return num_prompts * n

    @property
    def shows_logprobs(self) -> bool:
        """Return whether the answer has log-probabilities of its tokens."""
        return self.logprobs is not None or bool(self.logprob_token_ids)

    @property
    def only_scores(self) -> bool:
        """Return whether the answer is only the prompt."""
        return self.echo and self.max_tokens == 0


class CompletionResponseChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One of the n answers to one of the prompts."""

    index: int
    """The n answers to the first prompt come first."""
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[dict[int, PromptTokenLogprob] | None] | None = None


class CompletionResponse(msgspec.Struct, frozen=True, kw_only=True):
    """The whole answer."""

    id: str
    object: str = "text_completion"
    created: int = msgspec.field(default_factory=lambda: int(time.time()))
    model: str
    choices: list[CompletionResponseChoice]
    service_tier: str | None = None
    system_fingerprint: str | None = None
    usage: UsageInfo


class CompletionStreamResponse(msgspec.Struct, frozen=True, kw_only=True):
    """One event of a streamed answer."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[CompletionResponseChoice]
    usage: UsageInfo | UnsetType = UNSET
