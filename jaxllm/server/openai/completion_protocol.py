"""The types of text completions: the request, the answer, and the events of a stream."""

from __future__ import annotations

import time
from collections.abc import Mapping

import msgspec
from msgspec import UNSET, UnsetType

from jaxllm.exceptions import VLLMValidationError
from jaxllm.params.checks import INT32_MAX, check_int
from jaxllm.params.limits import MAX_N
from jaxllm.server.openai.logprobs import CompletionLogprobs, PromptTokenLogprob
from jaxllm.server.openai.prompt_fields import several_prompts
from jaxllm.server.openai.sampling_fields import REFUSED, SamplingFields
from jaxllm.server.openai.usage import UsageInfo

COMPLETION_REFUSED: Mapping[str, str] = {
    **REFUSED,
    "suffix": "models here go on from a text, and fill no gaps",
    "max_completion_tokens": "use max_tokens",
    "messages": "use /v1/chat/completions",
    **dict.fromkeys(("mm_processor_kwargs", "media_io_kwargs"), "prompts are texts or token ids; leave it out"),
}
"""Fields that are refused: they would change the answer and are not supported."""


class CompletionRequest(SamplingFields, kw_only=True):
    """The request of `/v1/completions`: OpenAI's fields and vLLM's."""

    prompt: str | list[str | int | list[int]]
    """A text, its token ids, or a list of either."""
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
        if self.logprob_token_ids and self.only_scores:
            message = "logprob_token_ids are scored at new tokens: leave them out, or ask for max_tokens above 0."
            raise VLLMValidationError(message, parameter="logprob_token_ids", value=self.logprob_token_ids)

    def prompts(self) -> list[str | list[int]]:
        """Return the prompts, each a text or token ids. Raises VLLMValidationError for any other."""
        return several_prompts("prompt", self.prompt)

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
