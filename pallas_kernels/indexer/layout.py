"""The shape that the op is compiled for, and the pool of index keys."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class IndexerShape(NamedTuple):
    """The shape that the op is compiled for, besides the batch. Dtypes are numpy's, so that equal shapes are one."""

    num_heads: int
    head_dim: int
    """The size of a query of one head, and of a key."""
    top_k: int
    """The most positions that are chosen for a row."""
    block_size: int
    dtype: Any
    """The dtype of queries and new keys."""
    kv_dtype: Any
    """The dtype of the pool."""


class IndexerPool(NamedTuple):
    """The pool is [l * b, o, head_dim], of all layers: one key for each token. 8-bit floats are held as uint8,
    except by the kernels of TPUs.

    Layer i owns blocks [i * b, (i + 1) * b), and block 0 of every layer is the null block, where padding writes.
    """

    # A JAX array, a numpy array in the reference, or its spec.
    keys: Any


def indexer_pool_spec(shape: IndexerShape, num_layers: int, num_blocks: int) -> IndexerPool:
    """Return shape and dtype of a pool of `num_blocks` blocks per layer, the null block counted."""
    # A compiler without 8-bit floats would widen the whole pool to scatter into it.
    dtype = jnp.uint8 if jnp.dtype(shape.kv_dtype).itemsize == 1 else shape.kv_dtype
    return IndexerPool(jax.ShapeDtypeStruct((num_layers * num_blocks, shape.block_size, shape.head_dim), dtype))


def tpu_pool_spec(shape: IndexerShape, num_layers: int, num_blocks: int) -> IndexerPool:
    """Return shape and dtype of a pool as the TPU's kernels have it: 8-bit floats keep their dtype."""
    [spec] = indexer_pool_spec(shape, num_layers, num_blocks)
    return IndexerPool(jax.ShapeDtypeStruct(spec.shape, shape.kv_dtype))
