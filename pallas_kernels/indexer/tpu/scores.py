"""The scores of a tile of keys, by rows of queries that lie so that heads are added up without a shuffle."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from pallas_kernels.paged_attention.tpu import float8
from pallas_kernels.paged_attention.tpu.options import LANES


def to_operand(keys_ch: Array, dtype: DTypeLike, *, unpacks_float8: bool) -> Array:
    """Return keys as a matmul takes them. A factor of all does not change the order of scores."""
    return float8.unpack(keys_ch, dtype) if unpacks_float8 else keys_ch.astype(dtype)


def score(q_xh: Array, factors_xl: Array, keys_ch: Array, num_rows: int) -> Array:
    """Return the scores [r, c] of keys.

    Args:
      q_xh: queries, [heads * r, h]: the rows' first heads, then their second ones, and so on.
      factors_xl: weights of the same, the same in all 128 lanes, float32.
      keys_ch: the keys, of the queries' dtype.
      num_rows: r.
    """
    precision = lax.Precision.HIGHEST if q_xh.dtype == jnp.float32 else None
    dimensions = (((1,), (1,)), ((), ()))
    products_xc = lax.dot_general(q_xh, keys_ch, dimensions, precision=precision, preferred_element_type=jnp.float32)
    width = products_xc.shape[1] // LANES
    weighted_xc = jnp.maximum(products_xc, 0) * jnp.concatenate([factors_xl] * width, axis=1)
    return weighted_xc.reshape(-1, num_rows, products_xc.shape[1]).sum(axis=0)


def spread_row(weights_1n: Array, num_heads: int) -> Array:
    """Return the factors [n, 128] of one row, whose weights [1, 128] are in lanes."""
    return jnp.broadcast_to(weights_1n, (LANES, LANES)).T[:num_heads]


def spread_rows(weights_rn: Array, num_heads: int) -> Array:
    """Return the factors [n * r, 128] of rows, whose weights [r, 128] are in lanes."""
    heads = [jnp.broadcast_to(weights_rn[:, i : i + 1], weights_rn.shape) for i in range(num_heads)]
    return jnp.concatenate(heads, axis=0)
