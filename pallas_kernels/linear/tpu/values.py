"""The numbers of codes in the TPU's kernels."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.pallas import tpu as pltpu
from jax.typing import DTypeLike

from pallas_kernels.weights import WeightFormat


def values(codes: Array, form: WeightFormat, dtype: DTypeLike) -> Array:
    """Return the numbers of codes over `unit`, before offsets, scales and mins; bfloat16 holds them exactly."""
    if form.values == "e2m1":
        code = codes.astype(jnp.int32)
        # A subnormal code is twice the number that it would be if it were normal, less the leading one.
        large = lax.bitcast_convert_type(((code & 7) << 22) + (126 << 23), jnp.float32)
        magnitude = jnp.minimum(large, 2 * large - 1)
        return jnp.where(code < 8, magnitude, -magnitude).astype(dtype)
    if form.values == "e4m3" and _has_other_float8():
        # The same numbers except for their unit and for -0, whose code is not a number in this format.
        integers = lax.bitcast_convert_type(codes, jnp.int8)
        integers = jnp.where(integers == -128, jnp.zeros_like(integers), integers)
        codes = lax.bitcast_convert_type(integers, jnp.float8_e4m3b11fnuz)
    return codes.astype(dtype)


def unit(form: WeightFormat) -> float:
    """Return the power of two that `values` are multiplied by, together with their scales."""
    return 16.0 if form.values == "e4m3" and _has_other_float8() else 1.0


def _has_other_float8() -> bool:
    """Return whether the TPU widens float8 of bias 11 in hardware, and of bias 7 only by arithmetic: v5e, v5p and v6e.

    An interpreter acts like them.
    """
    return not pltpu.is_tpu_device() or pltpu.get_tpu_info().generation in (5, 6)
