"""vLLM's `PoolingParams`: how to pool hidden states."""

from __future__ import annotations

import copy
from typing import Any

import msgspec

from jaxllm.exceptions import VLLMValidationError
from jaxllm.params.checks import INT32_MAX, INT64_MAX, check_bool, check_int, check_ints, check_kind, shown
from jaxllm.sampling_params import RequestOutputKind

TASKS = ("embed", "classify", "token_embed", "token_classify")
EMBED_TASKS = ("embed", "token_embed")
CLASSIFY_TASKS = ("classify", "token_classify")
TOKEN_TASKS = ("token_embed", "token_classify")
"""The tasks with an output per token; the others have one per sequence."""
MAX_RETURNED = 2**20
_GONE_TASKS = {
    "score": "`score` task was removed; use `classify` instead.",
    "encode": "`encode` task was removed; use `token_embed` or `token_classify` instead.",
}
_REFUSED = {
    "late_interaction_params": "scores by late interaction are computed on the host; see LLM.score",
    "extra_kwargs": "there are no plugins that pool",
}


class LateChunkingParams(msgspec.Struct, omit_defaults=True):
    """Parameters for one embedding per chunk of tokens, computed from the hidden states of the whole text."""

    chunk_size: int
    """The number of tokens in a chunk, special ones included; the last chunk has the rest."""

    def __post_init__(self) -> None:
        check_int("chunk_size", self.chunk_size, 1, INT64_MAX, parameter="late_chunking_params")


class PoolingParams(msgspec.Struct, omit_defaults=True):
    """How one request's hidden states become an output; None is the model's default."""

    use_activation: bool | None = None
    """Normalize embeddings, or turn class scores into probabilities."""
    dimensions: int | None = None
    """Shorten embeddings to this many dimensions, if the model supports it."""
    step_tag_id: int | None = None
    """The token whose outputs are returned, for a model with tok_pooling_type STEP."""
    returned_token_ids: list[int] | None = None
    """The indices of the numbers returned of each output, for a model with tok_pooling_type STEP."""
    task: str | None = None
    """"embed", "classify", "token_embed" or "token_classify"; methods for one of them set it."""
    requires_token_ids: bool = False
    """No effect: a request's token ids are always available."""
    skip_reading_prefix_cache: bool | None = None
    """Compute the whole prompt, including its cached part; tasks that need all tokens' outputs always do."""
    late_interaction_params: dict[str, Any] | None = None
    extra_kwargs: dict[str, Any] | None = None
    output_kind: RequestOutputKind = RequestOutputKind.FINAL_ONLY
    late_chunking_params: LateChunkingParams | None = None
    """Return the mean of each chunk of tokens in place of their outputs, for the task "token_embed"."""

    def __post_init__(self) -> None:
        for name in ("use_activation", "requires_token_ids", "skip_reading_prefix_cache"):
            if getattr(self, name) is not None:
                check_bool(name, getattr(self, name))
        if self.dimensions is not None:
            self.dimensions = check_int("dimensions", self.dimensions, 1, INT32_MAX)
        if self.step_tag_id is not None:
            self.step_tag_id = check_int("step_tag_id", self.step_tag_id, 0, INT32_MAX)
        if self.returned_token_ids is not None:
            ids = check_ints("returned_token_ids", self.returned_token_ids, 0, INT32_MAX, MAX_RETURNED)
            self.returned_token_ids = ids
        check_kind("task", self.task, str)
        check_kind("late_chunking_params", self.late_chunking_params, LateChunkingParams)
        if self.task in _GONE_TASKS:
            raise VLLMValidationError(_GONE_TASKS[self.task], parameter="task", value=self.task)
        for name, reason in _REFUSED.items():
            value = getattr(self, name)
            if value is not None:
                message = f"{name}={shown(value)} is not supported: {reason}. Leave {name} at None."
                raise VLLMValidationError(message, parameter=name, value=value)
        if self.output_kind != RequestOutputKind.FINAL_ONLY:
            message = f"For pooling output_kind has to be FINAL_ONLY, got {shown(self.output_kind)}"
            raise VLLMValidationError(message, parameter="output_kind", value=self.output_kind)

    def clone(self) -> PoolingParams:
        """Return a deep copy, checked again since fields may have been assigned."""
        copied = copy.copy(self)  # __post_init__ makes the list anew
        copied.__post_init__()
        return copied
