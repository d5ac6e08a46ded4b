"""The outputs of requests: vLLM's `RequestOutput` and its parts, field for field."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import MutableSequence, Sequence
from typing import TYPE_CHECKING, Any, Self

from jaxllm.logprobs import FlatLogprobs, Logprob, PromptLogprobs, SampleLogprobs  # noqa: F401 (users import them from here too)

if TYPE_CHECKING:
    import numpy as np

logger = logging.getLogger(__name__)


@dataclasses.dataclass(slots=True)
class RequestStateStats:
    """The times of a request's events. `arrival_time` is time.time(); the `_ts` are time.monotonic(), in seconds."""

    num_generation_tokens: int = 0
    num_preemptions: int = 0
    """How often the request was preempted: its blocks were freed and computed again."""
    arrival_time: float = 0.0
    queued_ts: float = 0.0
    scheduled_ts: float = 0.0
    first_token_ts: float = 0.0
    last_token_ts: float = 0.0
    first_token_latency: float = 0.0
    is_corrupted: bool = False
    """Always False: outputs are not checked for NaNs."""
    is_watermarked: bool = False
    is_watermark_skipped: bool = False
    """Always False: there are no watermarks."""


class BlamedReason(str):
    """The `stop_reason` of an output that an argument of its request has ended with "error"."""

    __slots__ = ("parameter",)
    parameter: str
    """The argument, such as structured_outputs."""

    @classmethod
    def of(cls, message: str, parameter: str) -> Self:
        """Return a message with the argument to blame."""
        reason = cls(message)
        reason.parameter = parameter
        return reason


@dataclasses.dataclass(slots=True)
class CompletionOutput:
    """One of a request's n outputs."""

    index: int
    text: str
    token_ids: Sequence[int]
    cumulative_logprob: float | None
    """The sum of the log-probabilities of the output's own tokens; None unless `logprobs` were requested."""
    logprobs: SampleLogprobs | None
    routed_experts: Any | None = None
    finish_reason: str | None = None
    """None while the output goes on; else "stop", "length", "abort", "error" or "repetition"."""
    stop_reason: int | str | None = None
    """The stop string or token id that ended the output; None for EOS; for "error", the error message."""
    lora_request: Any | None = None
    sampling_mask: Any | None = None
    spec_decode_metrics: Any | None = None
    weight_versions: Any | None = None
    """Always None, like lora_request, routed_experts, sampling_mask and spec_decode_metrics."""

    def finished(self) -> bool:
        """Return whether this output is complete."""
        return self.finish_reason is not None


class _TakesLaterFields(type):
    """A metaclass that warns of unknown fields instead of raising, so that code for a later vLLM still runs."""

    if not TYPE_CHECKING:  # a __call__ seen by type checkers would hide the fields from them

        def __call__(cls, *args, **fields):
            known = cls.__dataclass_fields__.keys()
            if not known >= fields.keys():  # made for each streamed token: usually nothing is copied
                logger.warning("%s has no %s here: ignored.", cls.__name__, ", ".join(sorted(fields.keys() - known)))
                fields = {name: value for name, value in fields.items() if name in known}
            return super().__call__(*args, **fields)


@dataclasses.dataclass(slots=True, frozen=True)
class PlaceholderRange:
    """Consecutive prompt tokens that stand for an image or a video."""

    offset: int
    length: int


@dataclasses.dataclass(slots=True)
class RequestOutput(metaclass=_TakesLaterFields):
    """The text generated for one prompt, in total or since the previous output (`SamplingParams.output_kind`)."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int] | None
    prompt_logprobs: PromptLogprobs | None
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestStateStats | None = None
    lora_request: Any | None = None
    encoder_prompt: str | None = None
    encoder_prompt_token_ids: list[int] | None = None
    num_cached_tokens: int | None = None
    """The number of prompt tokens taken from the prefix cache."""
    num_cache_creation_tokens: int | None = None
    """The number of other prompt tokens that the prefix cache now holds."""
    kv_transfer_params: dict[str, Any] | None = None
    ec_transfer_params: dict[str, Any] | None = None
    multi_modal_placeholders: dict[str, list[PlaceholderRange]] | None = None
    """The runs of prompt tokens that stand for images and videos, by modality; None if there are none."""
    prompt_token_id_logprobs: np.ndarray | None = dataclasses.field(default=None, compare=False)
    """The values at prompt_logprob_token_ids, as float32 of the same shape; -inf where a row has -1."""
    prompt_hidden_states: np.ndarray | None = dataclasses.field(default=None, compare=False)
    """In the last output the hidden states that extra_args["hidden_states"] asks for, float32 [layers, tokens, d]."""

    def add(self, next_output: RequestOutput, aggregate: bool) -> None:
        """Merge a later output of the same request: append its deltas if `aggregate`, else let it replace this one."""
        self.finished |= next_output.finished
        self.metrics = next_output.metrics or self.metrics
        if next_output.num_cached_tokens is not None:
            self.num_cached_tokens = next_output.num_cached_tokens
            self.num_cache_creation_tokens = next_output.num_cache_creation_tokens
        if next_output.prompt_token_id_logprobs is not None:
            self.prompt_token_id_logprobs = next_output.prompt_token_id_logprobs
        if next_output.prompt_hidden_states is not None:
            self.prompt_hidden_states = next_output.prompt_hidden_states
        # Deltas have those of the prompt once, in full, and are empty otherwise.
        if next_output.prompt_logprobs or not self.prompt_logprobs:
            self.prompt_logprobs = next_output.prompt_logprobs
        places = {completion.index: i for i, completion in enumerate(self.outputs)}
        for completion in next_output.outputs:
            if completion.index not in places:
                self.outputs.append(completion)
            elif aggregate:
                _append(self.outputs[places[completion.index]], completion)
            else:
                self.outputs[places[completion.index]] = completion


def _append(completion: CompletionOutput, delta: CompletionOutput) -> None:
    completion.text += delta.text
    if not isinstance(completion.token_ids, MutableSequence):
        completion.token_ids = list(completion.token_ids)
    completion.token_ids.extend(delta.token_ids)
    if completion.logprobs is None:
        completion.logprobs = delta.logprobs
    elif delta.logprobs:
        completion.logprobs.extend(delta.logprobs)
    completion.cumulative_logprob = delta.cumulative_logprob
    completion.finish_reason = delta.finish_reason
    completion.stop_reason = delta.stop_reason


@dataclasses.dataclass(slots=True)
class PoolingOutput:
    """Pooled hidden states of a request."""

    data: Any


@dataclasses.dataclass(frozen=True, slots=True)
class LateChunk:
    """A run of tokens that has one embedding."""

    token_range: tuple[int, int]
    char_range: tuple[int, int] | None
    """The characters of the chunk's tokens in the text; None if it has only special tokens."""


@dataclasses.dataclass(frozen=True, slots=True)
class LateChunkingMetadata:
    """The chunks of a text."""

    chunk_size: int
    input_tokens: int
    chunks: list[LateChunk]
    strategy: str = "fixed_tokens"


@dataclasses.dataclass(slots=True)
class PoolingRequestOutput[Output]:
    """The pooled output of one prompt."""

    request_id: str
    outputs: Output
    prompt_token_ids: list[int]
    num_cached_tokens: int
    finished: bool
    error: str | None = None
    """The error message of a request that failed; else None."""
    late_chunking: LateChunkingMetadata | None = None
    """The chunks for the rows of the output, with late_chunking_params."""
    multi_modal_placeholders: dict[str, list[PlaceholderRange]] | None = None
    """The runs of prompt tokens that stand for images and videos, by modality; None if there are none."""


@dataclasses.dataclass(slots=True)
class EmbeddingOutput:
    """One embedding vector."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        """Return the vector's length."""
        return len(self.embedding)


@dataclasses.dataclass(slots=True)
class ClassificationOutput:
    """One probability per class."""

    probs: list[float]

    @property
    def num_classes(self) -> int:
        """Return the number of classes."""
        return len(self.probs)


@dataclasses.dataclass(slots=True)
class ScoringOutput:
    """One similarity score."""

    score: float


class EmbeddingRequestOutput(PoolingRequestOutput[EmbeddingOutput]):
    """The output of `LLM.embed` for one prompt."""

    @classmethod
    def from_base(cls, output: PoolingRequestOutput[PoolingOutput]) -> Self:
        """Make one from an output of `LLM.encode`."""
        return _converted(cls, output, EmbeddingOutput(output.outputs.data.tolist()))


class ClassificationRequestOutput(PoolingRequestOutput[ClassificationOutput]):
    """The output of `LLM.classify` for one prompt."""

    @classmethod
    def from_base(cls, output: PoolingRequestOutput[PoolingOutput]) -> Self:
        """Make one from an output of `LLM.encode`."""
        return _converted(cls, output, ClassificationOutput(output.outputs.data.tolist()))


class ScoringRequestOutput(PoolingRequestOutput[ScoringOutput]):
    """The output of `LLM.score` for one pair."""

    @classmethod
    def from_base(cls, output: PoolingRequestOutput[PoolingOutput]) -> Self:
        """Make one from an output of `LLM.encode`, which has one number for the pair."""
        return _converted(cls, output, ScoringOutput(float(output.outputs.data.reshape(()))))


def _converted[Converted: PoolingRequestOutput[Any]](
    kind: type[Converted], output: PoolingRequestOutput[PoolingOutput], outputs: Any
) -> Converted:
    return kind(
        output.request_id,
        outputs,
        output.prompt_token_ids,
        output.num_cached_tokens,
        output.finished,
        output.error,
        multi_modal_placeholders=output.multi_modal_placeholders,
    )


type AnyOutput = Any
"""A RequestOutput, or a PoolingRequestOutput for a request with PoolingParams: the caller knows which."""
