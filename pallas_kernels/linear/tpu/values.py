"""The numbers of codes in a TPU's kernels."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from pallas_kernels.weights import WeightFormat


def values(codes: Array, form: WeightFormat, dtype: DTypeLike) -> Array:
    """Return the numbers of codes before offsets, scales and mins; bfloat16 holds them exactly."""
    if form.values == "e2m1":
        code = codes.astype(jnp.int32)
        # As if the smallest exponent had a leading one: twice that, less the one.
        large = lax.bitcast_convert_type(((code & 7) << 22) + (126 << 23), jnp.float32)
        magnitude = jnp.minimum(large, 2 * large - 1)
        return jnp.where(code < 8, magnitude, -magnitude).astype(dtype)
    return codes.astype(dtype)
