"""Named shapes of real models, shared by tests, compile checks and benchmarks."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp

from .layout import AttentionShape


class Case(NamedTuple):
    """The attention of one model."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None = None
    soft_cap: float | None = None
    has_sinks: bool = False

    def shape(self, block_size: int = 64, dtype: Any = jnp.bfloat16, kv_dtype: Any = None) -> AttentionShape:
        """Return the shape that the op is compiled for; the pool is of `dtype` unless `kv_dtype` is set."""
        dtype, kv_dtype = jnp.dtype(dtype), jnp.dtype(dtype if kv_dtype is None else kv_dtype)
        return AttentionShape(self.num_heads, self.num_kv_heads, self.head_dim, block_size, dtype, kv_dtype)


CASES: dict[str, Case] = {
    "smollm2-135m": Case(9, 3, 64),
    "llama-3.2-1b": Case(32, 8, 64),
    "llama-3-8b": Case(32, 8, 128),
    "qwen3-0.6b": Case(16, 8, 128),
    "gemma-2-2b-sliding": Case(8, 4, 256, window=4096, soft_cap=50.0),
    "gemma-3-270m-sliding": Case(4, 1, 256, window=512),
    "llama-2-7b": Case(32, 32, 128),
    "gemma-4-26b-global": Case(16, 2, 512),
    "gemma-4-26b-sliding": Case(16, 8, 256, window=1024),
    "gpt-oss-20b-sliding": Case(64, 8, 64, window=128, has_sinks=True),
}
