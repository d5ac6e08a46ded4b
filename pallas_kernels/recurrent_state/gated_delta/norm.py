"""Bring queries and keys to length 1."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax

from .reference import NORM_EPS


def normed(x_skd: Array) -> Array:
    """Return float32 vectors with length 1."""
    return x_skd.astype(jnp.float32) * norm(x_skd)


def norm(x_skd: Array) -> Array:
    """Return the factors that bring vectors to length 1, in float32."""
    x_skd = x_skd.astype(jnp.float32)
    return lax.rsqrt(jnp.sum(x_skd * x_skd, axis=-1, keepdims=True) + NORM_EPS)
