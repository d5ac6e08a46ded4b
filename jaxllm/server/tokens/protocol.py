"""The types of generating from token ids, in vLLM's form."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from jaxllm.engine.transport.engine_ready import EngineReady
from jaxllm.exceptions import VLLMValidationError, unknown_parameter
from jaxllm.params.checks import shown
from jaxllm.params.structured_outputs import StructuredOutputsParams
from jaxllm.sampling_params import RepetitionDetectionParams, RequestOutputKind, SamplingParams
from jaxllm.server.openai.logprobs import ChatLogprobs, PromptTokenLogprob
from jaxllm.server.openai.sampling_fields import SamplingFields, StreamOptions, checked_arguments, made
from jaxllm.server.openai.usage import UsageInfo

TOKENS_REFUSED: Mapping[str, str] = {
    "features": "prompts are token ids; send images to /v1/chat/completions",
    "kv_transfer_params": "the KV cache is not moved between engines",
    "prompt": "the prompt is token_ids; send texts to /v1/completions",
}
"""Fields that are refused: they would change the answer and are not supported."""
_SERVERS = frozenset({"output_kind", "skip_clone", "flat_logprobs", "detokenize", "output_text_buffer_length"})
"""Sampling params that the route sets itself: they concern Python objects and texts, and the answer has neither."""
_NESTED: Mapping[str, Any] = {
    "structured_outputs": StructuredOutputsParams,
    "repetition_detection": RepetitionDetectionParams,
}


class GenerateRequest(msgspec.Struct, kw_only=True):
    """The request of `/inference/v1/generate`."""

    token_ids: list[int]
    """The prompt."""
    sampling_params: dict[str, Any]
    """The fields of `SamplingParams`. Those left out have its defaults, not the model's generation_config.json's, but
    `max_tokens`: without it an answer may fill the context.
    """
    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    cache_salt: str | None = None
    priority: int = 0
    request_id: str | None = None

    @contextlib.contextmanager
    def fields_named(self) -> Iterator[None]:
        """Make errors raised inside name the request's own fields."""
        try:
            yield
        except VLLMValidationError as error:
            if error.parameter in self.__struct_fields__:
                raise
            name = "token_ids" if error.parameter in ("prompt", "prompt_token_ids") else "sampling_params"
            message = str(error) if name in str(error) else f"{name}: {error}"
            raise VLLMValidationError(message, parameter=name, value=error.value) from error

    def params(self, ready: EngineReady) -> SamplingParams:
        """Return the sampling params. Raises VLLMValidationError for an unknown one or a bad value."""
        fields = {name: value for name, value in self.sampling_params.items() if name not in _SERVERS}
        for name in fields.keys() - _NAMES:
            raise unknown_parameter("sampling_params", name, fields[name], _NAMES, {})
        for name, kind in _NESTED.items():
            if fields.get(name) is not None:
                fields[name] = made(kind, name, _object(name, fields[name]))
        if self.stream and fields.get("prompt_logprobs") is not None:
            message = "prompt_logprobs is not available when stream is true."
            raise VLLMValidationError(message, parameter="prompt_logprobs")
        if fields.get("max_tokens") is None:
            fields["max_tokens"] = SamplingFields.bounded(None, ready)
        try:
            params = msgspec.convert(fields, SamplingParams, strict=False, str_keys=True)
        except msgspec.ValidationError as error:
            if isinstance(error.__cause__, VLLMValidationError):
                raise error.__cause__ from None
            raise VLLMValidationError(f"{error}.") from None
        checked_arguments("extra_args", params.extra_args)
        params.detokenize = bool(params.stop)  # stop strings are looked for in the text
        params.output_kind = RequestOutputKind.DELTA if self.stream else RequestOutputKind.FINAL_ONLY
        params.skip_clone = True  # nobody else has them
        return params


def _object(name: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise VLLMValidationError(f"{name} must be an object, got {shown(value)}.", parameter=name, value=shown(value))
    return value


_NAMES = frozenset(name for name in SamplingParams.__struct_fields__ if not name.startswith("_")) - _SERVERS


class GenerateResponseChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One of the n answers, whole or the delta since the last event."""

    index: int
    token_ids: list[int]
    logprobs: ChatLogprobs | None = None
    """The log-probabilities, with "token_id:5" for the texts of tokens."""
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class GenerateResponse(msgspec.Struct, frozen=True, kw_only=True):
    """The whole answer."""

    id: str
    request_id: str
    """The same as `id`."""
    created: int = msgspec.field(default_factory=lambda: int(time.time()))
    model: str
    choices: list[GenerateResponseChoice]
    usage: UsageInfo
    prompt_logprobs: list[dict[int, PromptTokenLogprob] | None] | None = None


class GenerateStreamResponse(msgspec.Struct, frozen=True, kw_only=True):
    """One event of a streamed answer."""

    request_id: str
    choices: list[GenerateResponseChoice]
    usage: UsageInfo | UnsetType = UNSET
