"""What the op must know before it is compiled."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp


class SegmentShape(NamedTuple):
    """The heads of one tower: queries, keys and values have the same number and size."""

    num_heads: int
    head_dim: int
    dtype: jnp.dtype
    """bfloat16 or float32."""
