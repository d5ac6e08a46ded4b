"""Tests of what pools take the settings of a model that embeds from here."""

from __future__ import annotations

from jaxllm.config.pooling import PoolingSettings

EMBEDDER = PoolingSettings(
    model="minilm",
    tasks=("embed", "token_embed"),
    activation="normalize",
    use_activation=True,
    dimensions=None,
    step_tag_id=None,
    returned_token_ids=None,
    is_step=False,
    logit_mean=0.0,
    logit_sigma=1.0,
    output_size=384,
    num_labels=None,
    id2label={},
    is_matryoshka=False,
    matryoshka_dimensions=None,
    prompts={},
    default_prompt_name=None,
    similarity="cosine",
    score_type="bi-encoder",
    has_token_types=True,
    runs_whole_tasks=(),
    lowercases=False,
)
