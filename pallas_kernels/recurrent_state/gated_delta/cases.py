"""Named shapes of real models, shared by tests and benchmarks."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp

from .shape import GatedDeltaShape


class Case(NamedTuple):
    """The layers of one model."""

    num_key_heads: int
    num_value_heads: int
    key_dim: int = 128
    value_dim: int = 128
    has_key_decay: bool = False

    def shape(self, dtype: Any = jnp.bfloat16) -> GatedDeltaShape:
        """Return the shape that the op is compiled for."""
        return GatedDeltaShape(*self, jnp.dtype(dtype))


CASES: dict[str, Case] = {
    "tiny": Case(2, 4, 32, 48),
    "tiny-key-decay": Case(2, 2, 16, 32, has_key_decay=True),
    "qwen3-next-80b-a3b": Case(16, 32),
    "qwen3.5-0.8b": Case(16, 16),
    "qwen3.5-9b": Case(16, 32),
    "qwen3.5-27b": Case(16, 48),
    "qwen3.5-35b-a3b": Case(16, 32),
    "qwen3.5-397b-a17b": Case(16, 64),
    "kimi-linear-48b-a3b": Case(32, 32, has_key_decay=True),
}
