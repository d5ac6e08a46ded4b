"""Rotary position embedding of a step's tokens."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array


class Rope(NamedTuple):
    """The rotation of each token's heads, float32 [t, h / 2] each."""

    cos_th: Array
    sin_th: Array


def rotate(x_tnh: Array, rope: Rope) -> Array:
    """Rotate the halves of each head, in float32."""
    first, second = jnp.split(x_tnh, 2, axis=-1)
    return jnp.concatenate(rotate_halves(first, second, rope.cos_th[:, None, :], rope.sin_th[:, None, :]), axis=-1)


def rotate_halves(first: Array, second: Array, cos: Array, sin: Array) -> tuple[Array, Array]:
    """Return the rotated first and second halves of heads, in their dtype; computed in float32."""
    dtype = first.dtype
    first, second = first.astype(jnp.float32), second.astype(jnp.float32)
    return (first * cos - second * sin).astype(dtype), (second * cos + first * sin).astype(dtype)
