"""top_k, top_p and min_p by thresholds on the weights, found by bisection: no sort.

The bits of non-negative floats order as the floats do, so bisecting the bits ends at the exact threshold. Ids as likely
as the threshold are all kept.
"""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
from jax import Array, lax

ONE_BITS = 0x3F800000  # of 1.0, the largest weight
NUM_STEPS = 30  # halvings of [0, ONE_BITS]


def truncate(weights_sv: Array, top_k_s: Array, top_p_s: Array, min_p_s: Array) -> Array:
    """Zero the weights (in [0, 1], each row's largest 1) that the row's settings cut off: min_p, top_k, then top_p.

    Args:
      weights_sv: unnormalised probabilities, float32.
      top_k_s: keep the k largest; 0 keeps all.
      top_p_s: keep the fewest largest whose sum reaches this part of what the other two left.
      min_p_s: drop what is below this part of the largest.
    """
    weights_sv = jnp.where(weights_sv >= min_p_s[:, None], weights_sv, 0.0)

    uses_k_s = (top_k_s > 0) & (top_k_s < weights_sv.shape[1])
    weights_sv = _cut(
        weights_sv, uses_k_s, lambda bits_sv, at_s1: (bits_sv >= at_s1).sum(axis=1, dtype=jnp.int32) >= top_k_s
    )

    wanted_s = top_p_s * weights_sv.sum(axis=1)
    return _cut(
        weights_sv,
        top_p_s < 1.0,
        lambda bits_sv, at_s1: jnp.where(bits_sv >= at_s1, weights_sv, 0.0).sum(axis=1) >= wanted_s,
    )


def _cut(weights_sv: Array, uses_s: Array, is_enough: Callable[[Array, Array], Array]) -> Array:
    """Drop all below the largest threshold at which what is kept `is_enough`, in the rows that use it."""
    bits_sv = lax.bitcast_convert_type(weights_sv, jnp.int32)

    def halve(_: Array, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        enough_s, too_high_s = bounds
        middle_s = enough_s + (too_high_s - enough_s) // 2
        is_enough_s = is_enough(bits_sv, middle_s[:, None])
        return jnp.where(is_enough_s, middle_s, enough_s), jnp.where(is_enough_s, too_high_s, middle_s)

    s = weights_sv.shape[0]
    bounds = (jnp.zeros(s, jnp.int32), jnp.full(s, ONE_BITS + 1, jnp.int32))
    threshold_s, _ = lax.fori_loop(0, jnp.where(uses_s.any(), NUM_STEPS, 0), halve, bounds)
    return jnp.where((bits_sv >= threshold_s[:, None]) | ~uses_s[:, None], weights_sv, 0.0)
