"""What comes back: vLLM's `RequestOutput` and its parts, field for field."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, MutableSequence, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, overload

if TYPE_CHECKING:
    import numpy as np


@dataclasses.dataclass(slots=True)
class Logprob:
    """One token's log-probability at one position."""

    logprob: float
    rank: int | None = None
    """Place of the token among all, from 1."""
    decoded_token: str | None = None
    """The token's text; None without detokenizing."""


LogprobsOnePosition = dict[int, Logprob]
"""Token id -> Logprob: the token itself first, then the most likely ones in falling order, then those asked for."""


@dataclasses.dataclass
class FlatLogprobs(MutableSequence[LogprobsOnePosition]):
    """What a list of positions holds, in six long lists: position i is entries start_indices[i] to end_indices[i].

    Made for programs that would rather not have thousands of small dicts. Reads and grows as such a list does, but
    no position can be changed.
    """

    start_indices: list[int] = dataclasses.field(default_factory=list)
    end_indices: list[int] = dataclasses.field(default_factory=list)
    token_ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    ranks: list[int | None] = dataclasses.field(default_factory=list)
    decoded_tokens: list[str | None] = dataclasses.field(default_factory=list)

    def append(self, value: LogprobsOnePosition | None) -> None:
        """Add a position; None is one without entries."""
        entries = (value or {}).values()
        self.append_fast(
            list(value or ()),
            [entry.logprob for entry in entries],
            [entry.rank for entry in entries],
            [entry.decoded_token for entry in entries],
        )

    def append_fast(
        self,
        token_ids: Iterable[int],
        logprobs: Iterable[float],
        ranks: Iterable[int | None],
        decoded_tokens: Iterable[str | None],
    ) -> None:
        """Add a position from its columns, which have one length."""
        self.start_indices.append(len(self.token_ids))
        self.token_ids.extend(token_ids)
        self.logprobs.extend(logprobs)
        self.ranks.extend(ranks)
        self.decoded_tokens.extend(decoded_tokens)
        self.end_indices.append(len(self.token_ids))

    def extend(self, values: Iterable[LogprobsOnePosition | None]) -> None:
        """Add positions."""
        for value in values:
            self.append(value)

    def __len__(self) -> int:
        return len(self.start_indices)

    @overload
    def __getitem__(self, index: int) -> LogprobsOnePosition: ...

    @overload
    def __getitem__(self, index: slice) -> FlatLogprobs: ...

    def __getitem__(self, index: int | slice) -> LogprobsOnePosition | FlatLogprobs:
        if isinstance(index, slice):
            chosen = FlatLogprobs()
            for start, end in zip(self.start_indices[index], self.end_indices[index], strict=True):
                one = slice(start, end)
                chosen.append_fast(self.token_ids[one], self.logprobs[one], self.ranks[one], self.decoded_tokens[one])
            return chosen
        return {
            self.token_ids[i]: Logprob(self.logprobs[i], self.ranks[i], self.decoded_tokens[i])
            for i in range(self.start_indices[index], self.end_indices[index])
        }

    def __setitem__(self, index: Any, value: Any) -> NoReturn:
        raise TypeError("positions of FlatLogprobs cannot be replaced")

    def __delitem__(self, index: Any) -> NoReturn:
        raise TypeError("positions of FlatLogprobs cannot be deleted")

    def insert(self, index: int, value: Any) -> NoReturn:
        """Refuse: positions are only added at the end."""
        del index, value
        raise TypeError("positions can only be appended to FlatLogprobs")


SampleLogprobs = list[LogprobsOnePosition] | FlatLogprobs
"""Per output token."""
PromptLogprobs = list[LogprobsOnePosition | None] | FlatLogprobs
"""Per prompt token; the first has none."""


@dataclasses.dataclass(slots=True)
class RequestStateStats:
    """When things happened to a request. `arrival_time` is time.time(); the `_ts` are time.monotonic(), in seconds."""

    num_generation_tokens: int = 0
    arrival_time: float = 0.0
    queued_ts: float = 0.0
    scheduled_ts: float = 0.0
    first_token_ts: float = 0.0
    last_token_ts: float = 0.0
    first_token_latency: float = 0.0
    is_corrupted: bool = False


@dataclasses.dataclass(slots=True)
class CompletionOutput:
    """One of a request's n outputs."""

    index: int
    text: str
    token_ids: Sequence[int]
    cumulative_logprob: float | None
    """Sum of what `logprobs` says of the output's own tokens; None unless they were asked for."""
    logprobs: SampleLogprobs | None
    routed_experts: Any | None = None
    finish_reason: str | None = None
    """None while it goes on; else "stop", "length", "abort", "error" or "repetition"."""
    stop_reason: int | str | None = None
    """The stop string or stop token id that ended it; None for the end of sequence; what went wrong for "error"."""
    lora_request: Any | None = None
    sampling_mask: Any | None = None

    def finished(self) -> bool:
        """Say whether this output is complete."""
        return self.finish_reason is not None


@dataclasses.dataclass(slots=True)
class RequestOutput:
    """Everything generated for one prompt, so far or since the last one (`SamplingParams.output_kind`)."""

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
    """Prompt tokens taken from the prefix cache."""
    num_cache_creation_tokens: int | None = None
    kv_transfer_params: dict[str, Any] | None = None
    ec_transfer_params: dict[str, Any] | None = None
    prompt_token_id_logprobs: np.ndarray | None = dataclasses.field(default=None, compare=False)
    """[rows, prompt_logprob_token_ids] float32: row i is of prompt position prompt_logprob_start + i + 1."""

    def add(self, next_output: RequestOutput, aggregate: bool) -> None:
        """Take in a later output of the same request: append its deltas if `aggregate`, else let it replace ours."""
        self.finished |= next_output.finished
        self.metrics = next_output.metrics or self.metrics
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
    """Pooled hidden states as the model gives them."""

    data: Any


@dataclasses.dataclass(slots=True)
class PoolingRequestOutput[Output]:
    """The pooled output of one prompt."""

    request_id: str
    outputs: Output
    prompt_token_ids: list[int]
    num_cached_tokens: int
    finished: bool


@dataclasses.dataclass(slots=True)
class EmbeddingOutput:
    """One embedding vector."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        """The vector's length."""
        return len(self.embedding)


@dataclasses.dataclass(slots=True)
class ClassificationOutput:
    """One probability per class."""

    probs: list[float]

    @property
    def num_classes(self) -> int:
        """How many classes there are."""
        return len(self.probs)


@dataclasses.dataclass(slots=True)
class ScoringOutput:
    """One similarity score."""

    score: float


class EmbeddingRequestOutput(PoolingRequestOutput[EmbeddingOutput]):
    """What `LLM.embed` returns per prompt."""


class ClassificationRequestOutput(PoolingRequestOutput[ClassificationOutput]):
    """What `LLM.classify` returns per prompt."""


class ScoringRequestOutput(PoolingRequestOutput[ScoringOutput]):
    """What `LLM.score` returns per pair."""
