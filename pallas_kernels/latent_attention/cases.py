"""Named shapes of real models, shared by tests, compile checks and benchmarks."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp

from .layout import LatentShape


class _Case(NamedTuple):
    """The attention of one model."""

    num_heads: int
    latent_dim: int = 512
    rope_dim: int = 64

    def shape(
        self, block_size: int = 64, dtype: Any = jnp.bfloat16, kv_dtype: Any = None, top_k: int | None = None
    ) -> LatentShape:
        """Return the shape that the op is compiled for; the pool is of `dtype` unless `kv_dtype` is set."""
        dtype, kv_dtype = jnp.dtype(dtype), jnp.dtype(dtype if kv_dtype is None else kv_dtype)
        return LatentShape(self.num_heads, self.latent_dim, self.rope_dim, block_size, dtype, kv_dtype, top_k)


CASES: dict[str, _Case] = {
    "tiny": _Case(2, 16, 8),
    "deepseek-v2-lite": _Case(16),
    "deepseek-v3": _Case(128),
    "kimi-k2": _Case(64),
    "glm-4.7-flash": _Case(20),
    "mistral-small-4": _Case(32, 256),
}
