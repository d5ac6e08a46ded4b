"""vLLM's `PoolingParams` say how to pool hidden states."""

from __future__ import annotations

from typing import Any

import msgspec

from jaxllm.params.checks import INT32_MAX, check_bool, check_int, check_ints, check_kind
from jaxllm.sampling_params import RequestOutputKind


class PoolingParams(msgspec.Struct, omit_defaults=True):
    """Parameters that say how one request's hidden states become an output."""

    use_activation: bool | None = None
    """Apply the pooler's activation; None is the model's default."""
    dimensions: int | None = None
    """Shorten embeddings to this many dimensions, where the model allows it."""
    step_tag_id: int | None = None
    returned_token_ids: list[int] | None = None
    task: str | None = None
    requires_token_ids: bool = False
    skip_reading_prefix_cache: bool | None = None
    late_interaction_params: dict[str, Any] | None = None
    extra_kwargs: dict[str, Any] | None = None
    output_kind: RequestOutputKind = RequestOutputKind.FINAL_ONLY

    def __post_init__(self) -> None:
        for name in ("use_activation", "requires_token_ids", "skip_reading_prefix_cache"):
            if getattr(self, name) is not None:
                check_bool(name, getattr(self, name))
        if self.dimensions is not None:
            self.dimensions = check_int("dimensions", self.dimensions, 1, INT32_MAX)
        if self.step_tag_id is not None:
            self.step_tag_id = check_int("step_tag_id", self.step_tag_id, 0, INT32_MAX)
        if self.returned_token_ids is not None:
            self.returned_token_ids = check_ints("returned_token_ids", self.returned_token_ids, 0, INT32_MAX, 2**20)
        check_kind("task", self.task, str)
        check_kind("late_interaction_params", self.late_interaction_params, dict)
        check_kind("extra_kwargs", self.extra_kwargs, dict)
