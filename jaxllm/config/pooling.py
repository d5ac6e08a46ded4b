"""`PoolingSettings` say what a pooling model can do, and how its outputs become those of its requests."""

from __future__ import annotations

import msgspec


class PoolingSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of a model that pools. It is plain data and crosses to another process."""

    tasks: tuple[str, ...]
    activation: str = "none"
    use_activation: bool = True
    dimensions: int | None = None
    step_tag_id: int | None = None
    returned_token_ids: list[int] | None = None
    logit_mean: float = 0.0
    logit_sigma: float = 1.0
    output_size: int
    num_labels: int | None = None
    id2label: dict[str, str] = {}
    is_matryoshka: bool = False
    matryoshka_dimensions: list[int] | None = None
    prompts: dict[str, str] = {}
    default_prompt_name: str | None = None
    similarity: str = "cosine"
    score_type: str | None = None
    has_token_types: bool = False
    runs_whole_tasks: tuple[str, ...] = ()
