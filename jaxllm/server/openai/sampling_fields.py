"""The sampling fields that chat and text completions share: OpenAI's and vLLM's."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import msgspec

from jaxllm.engine.transport.engine_ready import EngineReady
from jaxllm.exceptions import VLLMValidationError
from jaxllm.params.checks import shown
from jaxllm.params.hidden_states import HIDDEN_STATES
from jaxllm.params.structured_outputs import StructuredOutputsParams
from jaxllm.sampling_params import BeamSearchParams, RepetitionDetectionParams, RequestOutputKind, SamplingParams
from jaxllm.server.openai.prompt_fields import PromptFields, renamed

_DEFAULTED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
"""Fields that default to the model's generation_config.json."""

_NOT_PASSED_ON = "processed images are not returned or passed on; leave it out"
_INSTEAD = "use structured_outputs"
REFUSED: Mapping[str, str] = {
    "guided_json": f"{_INSTEAD}={{'json': ...}}",
    "guided_regex": f"{_INSTEAD}={{'regex': ...}}",
    "guided_choice": f"{_INSTEAD}={{'choice': ...}}",
    "guided_grammar": f"{_INSTEAD}={{'grammar': ...}}",
    "guided_decoding_backend": "there is one backend",
    "guided_whitespace_pattern": f"{_INSTEAD}={{'whitespace_pattern': ...}}",
    "structural_tag": f"{_INSTEAD}={{'structural_tag': ...}}",
    "early_stopping": "a beam search ends when no beam can do better",
    "logits_processors": "name them when the server is started (--logits-processors)",
    "kv_transfer_params": "the KV cache is not moved between engines",
    "ec_transfer_params": "encoded images are not moved between engines",
    "prompt_embeds": "send them to /v1/completions",
    **dict.fromkeys(("mm_payload", "return_mm_kwargs"), _NOT_PASSED_ON),
    "watermarking": "outputs have no watermarks; leave it out",
    "return_weight_versions": "weights do not change while a server runs; leave it out",
    "return_token_offsets": "no route renders prompts without answering them; leave it out",
    "routed_experts_prompt_start": "which experts a token went to is not returned; leave it out",
}
"""Fields of vLLM, present or past, that are refused: they would change the answer."""

_NOT_OF_BEAMS = (
    *("stop", "stop_token_ids", "logit_bias", "bad_words", "min_tokens", "prompt_logprobs"),
    *("logprob_token_ids", "thinking_token_budget", "repetition_detection", "vllm_xargs"),
)


class StreamOptions(msgspec.Struct, frozen=True):
    """The options of a stream."""

    include_usage: bool | None = None
    """Whether the last event before [DONE] has the usage."""
    continuous_usage_stats: bool | None = None
    """Whether every event has the usage so far."""

    def tells_usage(self, *, forced: bool = False) -> tuple[bool, bool]:
        """Return whether a stream ends with the usage, and whether all events have it. With `forced` both are true."""
        is_last = forced or bool(self.include_usage)
        return is_last, forced or (is_last and bool(self.continuous_usage_stats))


class TokenFields(PromptFields, kw_only=True):
    """A request's fields for sampling and for the end of the text. `SamplingParams` check their ranges."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    min_tokens: int = 0
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    thinking_token_budget: int | None = None
    repetition_detection: dict[str, int] | None = None
    structured_outputs: dict[str, Any] | None = None
    vllm_xargs: dict[str, Any] | None = None
    session_id: str | None = None
    """It has no effect on the answer: it is for choosing between servers."""


class SamplingFields(TokenFields, kw_only=True):
    """The sampling fields of requests for n answers, which may use beam search, logprobs and streams."""

    n: int | None = None
    best_of: int | None = None
    """It must equal `n`: no answer is left out."""
    max_tokens: int | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: list[int] | None = None
    """Token ids to return the log-probabilities of, instead of the most likely tokens."""
    response_format: dict[str, Any] | None = None
    use_beam_search: bool = False
    length_penalty: float = 1.0
    stream: bool = False
    stream_options: StreamOptions | None = None
    stream_interval: int | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool | None = None

    def fields_named(self, prompt: str) -> AbstractContextManager[None]:
        """Make errors raised inside name the request's own fields; `prompt` is the prompt's field."""
        names = {
            **dict.fromkeys(("structured_outputs", *StructuredOutputsParams.__struct_fields__), self.constraint),
            **dict.fromkeys(RepetitionDetectionParams.__struct_fields__, "repetition_detection"),
            "extra_args": "vllm_xargs",
            "prompt": prompt,
            "prompt_token_ids": prompt,
            "multi_modal_data": prompt,
        }
        return renamed(names)

    @property
    def constraint(self) -> str:
        """Return the name of the field that constrains the text."""
        return "structured_outputs" if self.response_format is None else "response_format"

    def check_fields(self) -> None:
        """Refuse fields that conflict. Raises VLLMValidationError."""
        if self.best_of not in (None, 1 if self.n is None else self.n):
            message = (
                f"best_of must equal n, got {self.best_of}: ask for n={self.best_of} answers and choose among them."
            )
            raise VLLMValidationError(message, parameter="best_of", value=self.best_of)
        if any(self.tells_usage(forced=False)) and not self.stream:
            message = "stream_options can only be given when stream is true."
            raise VLLMValidationError(message, parameter="stream_options")
        for name in ("prompt_logprobs", "use_beam_search"):
            if self.stream and getattr(self, name):
                raise VLLMValidationError(f"{name} is not available when stream is true.", parameter=name)

    def beam_search_params(self, max_tokens: int) -> BeamSearchParams:
        """Return the params of a beam search of width n. Raises VLLMValidationError for unsupported fields."""
        for name in _NOT_OF_BEAMS:
            if getattr(self, name):
                raise VLLMValidationError(f"{name} has no effect in a beam search: leave it out.", parameter=name)
        return BeamSearchParams(
            beam_width=1 if self.n is None else self.n,
            max_tokens=max_tokens,
            ignore_eos=self.ignore_eos,
            temperature=self.temperature or 0.0,
            length_penalty=self.length_penalty,
            include_stop_str_in_output=self.include_stop_str_in_output,
            skip_special_tokens=self.skip_special_tokens,
            structured_outputs=structured_outputs(self.structured_outputs, self.response_format),
            allowed_token_ids=self.allowed_token_ids,
        )

    def tells_usage(self, *, forced: bool) -> tuple[bool, bool]:
        """Return whether a stream ends with the usage, and whether all events have it. With `forced` it always does, as
        with vLLM's flag.
        """
        return (self.stream_options or StreamOptions()).tells_usage(forced=forced)

    def shows_token_ids(self, default: bool) -> bool:
        """Return whether tokens of log-probabilities are shown as "token_id:5"; `default` is the server's."""
        return default if self.return_tokens_as_token_ids is None else self.return_tokens_as_token_ids

    @staticmethod
    def bounded(max_tokens: int | None, ready: EngineReady) -> int | None:
        """Return the limit on an answer's tokens for the number requested, as in vLLM; None for no limit."""
        asked = ready.default_sampling_params.get("max_tokens") if max_tokens is None else max_tokens
        bounds = [each for each in (asked, ready.max_output_tokens) if each is not None]
        return min(bounds, default=None)

    def sampling_params(
        self,
        ready: EngineReady,
        *,
        max_tokens: int | None,
        logprobs: int | None,
        prompt_logprobs: int | None = None,
    ) -> SamplingParams:
        """Return the engine's params, with defaults from `ready`. Raises VLLMValidationError.

        `prompt_logprobs` is the default for a request that does not set it.
        """
        if self.length_penalty != 1.0:
            message = "length_penalty has an effect in a beam search only: leave it out, or set use_beam_search."
            raise VLLMValidationError(message, parameter="length_penalty", value=self.length_penalty)
        fields = {name: getattr(self, name) for name in _DEFAULTED if getattr(self, name) is not None}
        base = {**ready.default_sampling_params, **fields}
        base.pop("max_tokens", None)
        return SamplingParams(
            **base,
            n=1 if self.n is None else self.n,
            seed=self.seed,
            stop=self.stop,
            stop_token_ids=self.stop_token_ids,
            max_tokens=self.bounded(max_tokens, ready),
            min_tokens=self.min_tokens,
            ignore_eos=self.ignore_eos,
            include_stop_str_in_output=self.include_stop_str_in_output,
            skip_special_tokens=self.skip_special_tokens,
            spaces_between_special_tokens=self.spaces_between_special_tokens,
            logprobs=None if self.logprob_token_ids else logprobs,
            prompt_logprobs=prompt_logprobs if self.prompt_logprobs is None else self.prompt_logprobs,
            logprob_token_ids=self.logprob_token_ids or None,
            logit_bias=_token_biases(self.logit_bias),
            allowed_token_ids=self.allowed_token_ids,
            bad_words=self.bad_words,
            thinking_token_budget=self.thinking_token_budget,
            repetition_detection=_repetition_detection(self.repetition_detection),
            structured_outputs=structured_outputs(self.structured_outputs, self.response_format),
            extra_args=checked_arguments("vllm_xargs", self.vllm_xargs),
            stream_interval=self.stream_interval,
            skip_clone=True,  # nobody else has them: a copy would be checked again
            output_kind=RequestOutputKind.DELTA if self.stream else RequestOutputKind.FINAL_ONLY,
        )


def structured_outputs(
    value: Mapping[str, Any] | None, response_format: Mapping[str, Any] | None
) -> StructuredOutputsParams | None:
    """Return the constraint on the text, from vLLM's field or from OpenAI's. Raises VLLMValidationError."""
    kind = None if response_format is None else response_format.get("type")
    if response_format is None or kind == "text":
        return None if value is None else made(StructuredOutputsParams, "structured_outputs", value)
    if value is not None:
        message = "give either response_format or structured_outputs, not both."
        raise VLLMValidationError(message, parameter="response_format", value=kind)
    if kind == "json_object":
        return StructuredOutputsParams(json_object=True)
    if kind == "json_schema":
        outer = response_format.get("json_schema")
        schema = outer.get("schema", outer.get("json_schema")) if isinstance(outer, Mapping) else None
        if not isinstance(schema, (Mapping, bool)):
            message = f"response_format.json_schema.schema must be a JSON schema, got {shown(schema)}."
            raise VLLMValidationError(message, parameter="response_format", value=schema)
        return StructuredOutputsParams(json=schema)
    if kind == "structural_tag":
        return StructuredOutputsParams(structural_tag=msgspec.json.encode(response_format).decode())
    message = (
        f"response_format.type must be 'text', 'json_object', 'json_schema' or 'structural_tag', got {shown(kind)}."
    )
    raise VLLMValidationError(message, parameter="response_format", value=kind)


def made(kind: Any, name: str, fields: Mapping[str, Any]) -> Any:
    """Return params of a kind. Raises VLLMValidationError, which names the field `name` for an unknown one inside."""
    try:
        return kind(**fields)
    except VLLMValidationError:
        raise
    except TypeError as error:
        raise VLLMValidationError(f"{name}: {error}.", parameter=name, value=shown(fields)) from error


def _repetition_detection(fields: Mapping[str, int] | None) -> RepetitionDetectionParams | None:
    return None if fields is None else made(RepetitionDetectionParams, "repetition_detection", fields)


def _token_biases(bias_by_text: Mapping[str, float] | None) -> dict[int, float] | None:
    """Return the biases by token id; JSON's keys are strings."""
    if bias_by_text is None:
        return None
    biases: dict[int, float] = {}
    for key, value in bias_by_text.items():
        if not key.isdecimal() or len(key) > 10:
            message = f"logit_bias must have token ids for keys, got {shown(key)}."
            raise VLLMValidationError(message, parameter="logit_bias", value=key)
        biases[int(key)] = value
    return biases


def checked_arguments(name: str, arguments: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return the extra arguments in a field. Raises VLLMValidationError for those that an answer has no place for."""
    if arguments and HIDDEN_STATES in arguments:
        message = f"{name}: {HIDDEN_STATES} are not returned over HTTP: use LLM or AsyncLLM."
        raise VLLMValidationError(message, parameter=name, value=arguments[HIDDEN_STATES])
    return arguments
