"""Named shapes of real models, shared by tests, compile checks and benchmarks."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp

from .layout import IndexerShape


class _Case(NamedTuple):
    """The indexer of one model."""

    num_heads: int
    head_dim: int = 128
    top_k: int = 2048

    def shape(self, block_size: int = 64, dtype: Any = jnp.bfloat16, kv_dtype: Any = None) -> IndexerShape:
        """Return the shape that the op is compiled for; the pool is of `dtype` unless `kv_dtype` is set."""
        dtype, kv_dtype = jnp.dtype(dtype), jnp.dtype(dtype if kv_dtype is None else kv_dtype)
        return IndexerShape(*self, block_size, dtype, kv_dtype)


CASES: dict[str, _Case] = {"tiny": _Case(2, 16, 24), "deepseek-v3.2": _Case(64), "glm-5": _Case(32)}
