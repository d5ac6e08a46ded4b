"""The shape that the op is compiled for, and the pool of latents."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

LANES = 128
"""The number of numbers in a row of a TPU's memory."""


class LatentShape(NamedTuple):
    """The shape that the op is compiled for, besides the batch. Dtypes are numpy's, so that equal shapes are one."""

    num_heads: int
    latent_dim: int
    """The size of a token's latent, which is its value in all heads and the first part of its key."""
    rope_dim: int
    """The size of the rest of a key, which RoPE has rotated."""
    block_size: int
    dtype: Any
    """The dtype of queries, new latents, and the output."""
    kv_dtype: Any
    """The dtype of the pool."""
    top_k: int | None = None
    """The most positions that a row attends to, where they are chosen for it; None: all rows attend to all before."""

    @property
    def key_dim(self) -> int:
        """Return the size of a key, which is also the size of a token's entry in the pool."""
        return self.latent_dim + self.rope_dim


class LatentPool(NamedTuple):
    """The pool is [l * b, o, latent_dim + rope_dim], of all layers: a token's latent, followed by its rotated part.

    8-bit floats are held as uint8, except by the kernels of TPUs and GPUs. Layer i owns blocks [i * b, (i + 1) * b),
    and block 0 of every layer is the null block, where padding writes. All of a token's numbers are its key, and the
    first of them are its value. In a TPU's pool a row has whole lanes, with zeros behind the rotated part; a TPU's
    memory pads it in any case.
    """

    # A JAX array, a numpy array in the reference, or its spec.
    latents: Any


def latent_pool_spec(shape: LatentShape, num_layers: int, num_blocks: int) -> LatentPool:
    """Return shape and dtype of a pool of `num_blocks` blocks per layer, the null block counted."""
    # A compiler without 8-bit floats would widen the whole pool to scatter into it.
    dtype = jnp.uint8 if jnp.dtype(shape.kv_dtype).itemsize == 1 else shape.kv_dtype
    return LatentPool(jax.ShapeDtypeStruct((num_layers * num_blocks, shape.block_size, shape.key_dim), dtype))


def row_columns(shape: LatentShape) -> int:
    """Return the length of a token's row in a pool of whole lanes."""
    return -(-shape.key_dim // LANES) * LANES


def tpu_pool_spec(shape: LatentShape, num_layers: int, num_blocks: int) -> LatentPool:
    """Return shape and dtype of a pool as the TPU's kernels have it."""
    dims = (num_layers * num_blocks, shape.block_size, row_columns(shape))
    return LatentPool(jax.ShapeDtypeStruct(dims, shape.kv_dtype))


def gpu_pool_spec(shape: LatentShape, num_layers: int, num_blocks: int) -> LatentPool:
    """Return shape and dtype of a pool as the GPU's kernels have it: 8-bit floats keep their dtype."""
    [spec] = latent_pool_spec(shape, num_layers, num_blocks)
    return LatentPool(jax.ShapeDtypeStruct(spec.shape, shape.kv_dtype))
