"""What XLA does with the sums that a kernel for GPUs has made."""

from __future__ import annotations

from functools import reduce

import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.weights.held import Quantized


def add_parts(
    sums: Array, num_rows: int, weight: Quantized, layer: Array | int, dtype: jnp.dtype, *, by_row: bool, is_whole: bool
) -> Array:
    """Return products of the first `num_rows` rows, [t, o]: parts of sums are added in order, then scaled and rounded.

    `sums` are [parts, t, o] if `by_row` and [parts, o, t] otherwise, with rows of padding last. If they are whole, the
    kernel has scaled them.
    """
    total = reduce(jnp.add, list(sums))
    products_to = (total if by_row else total.T)[:num_rows]
    if weight.format.group is None and not is_whole:
        products_to = products_to * lax.dynamic_index_in_dim(weight.scales, layer, keepdims=False).T
    return products_to.astype(dtype)
