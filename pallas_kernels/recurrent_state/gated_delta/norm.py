"""Queries and keys are brought to length 1."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax

from .reference import NORM_EPS


def normed(x_skd: Array) -> Array:
    """Return float32 vectors at length 1."""
    return x_skd.astype(jnp.float32) * norm(x_skd)


def norm(x_skd: Array) -> Array:
    """Return what vectors are to be multiplied by to have length 1, in float32."""
    x_skd = x_skd.astype(jnp.float32)
    return lax.rsqrt(jnp.sum(x_skd * x_skd, axis=-1, keepdims=True) + NORM_EPS)
