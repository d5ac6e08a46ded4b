"""Read float8_e4m3fn as float8_e4m3b11fnuz, which some TPUs unpack in one instruction instead of eight.

Both have the same numbers except for a factor: with the same bits, one is `FACTOR` times the other. Only minus zero of
float8_e4m3fn is NaN in the other format, which has no minus zero, and the NaN of float8_e4m3fn is a number there.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

_UNPACKED_KINDS = ("TPU v5 lite", "TPU v6 lite")
FACTOR = 16


def is_unpacked(dtype: DTypeLike, architecture: str | None) -> bool:
    """Return whether this kind of TPU reads a pool of this dtype like that."""
    return dtype == jnp.float8_e4m3fn and architecture in _UNPACKED_KINDS


def to_be_unpacked(x: Array) -> Array:
    """Return float8_e4m3fn with minus zero as zero, and NaN as minus zero, for `unpack`."""
    bits = lax.bitcast_convert_type(x, jnp.uint8)
    magnitude = bits & 0x7F
    bits = jnp.where(magnitude == 0, jnp.uint8(0), jnp.where(magnitude == 0x7F, jnp.uint8(0x80), bits))
    return lax.bitcast_convert_type(bits, x.dtype)


def unpack(x: Array, dtype: DTypeLike) -> Array:
    """Return the numbers divided by `FACTOR`."""
    return lax.bitcast_convert_type(x, jnp.float8_e4m3b11fnuz).astype(dtype)
