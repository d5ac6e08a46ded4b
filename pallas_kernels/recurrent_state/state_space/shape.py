"""The shape of a layer, for which the op is compiled, and its pool."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class StateSpaceShape(NamedTuple):
    """The shape that the op is compiled for, besides the batch. Its dtype is numpy's, so that equal shapes are one."""

    num_heads: int
    head_dim: int
    num_groups: int
    """A divisor of `num_heads`; head h has the b and c of group h // `group`."""
    state_dim: int
    dtype: Any
    """The dtype of x, b, c and the output. All else is float32."""

    @property
    def group(self) -> int:
        """Return the number of heads that share b and c."""
        return self.num_heads // self.num_groups


def pool_spec(shape: StateSpaceShape, num_layers: int, num_slots: int) -> jax.ShapeDtypeStruct:
    """Return shape and dtype of a pool of `num_slots` slots per layer, the null slot counted."""
    size = (num_layers * num_slots, shape.num_heads, shape.head_dim, shape.state_dim)
    return jax.ShapeDtypeStruct(size, jnp.float32)
