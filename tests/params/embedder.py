"""Tests of what pools take the settings of a model that embeds from here."""

from __future__ import annotations

from tests.pooling_settings import make_settings

EMBEDDER = make_settings(
    model="minilm",
    tasks=("embed", "token_embed"),
    activation="normalize",
    output_size=384,
    score_type="bi-encoder",
    has_token_types=True,
)
