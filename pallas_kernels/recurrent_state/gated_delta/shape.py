"""The shape of a layer, for which the op is compiled, and its pool."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class GatedDeltaShape(NamedTuple):
    """The shape that the op is compiled for, besides the batch. Its dtype is numpy's, so that equal shapes are one."""

    num_key_heads: int
    num_value_heads: int
    """A multiple of `num_key_heads`; value head j has key head j // `group`."""
    key_dim: int
    value_dim: int
    has_key_decay: bool
    """True if each number of a key has a decay, as in Kimi's delta attention; otherwise a head has one."""
    dtype: Any
    """The dtype of queries, keys, values and the output. All else is float32."""

    @property
    def group(self) -> int:
        """Return the number of value heads per key head."""
        return self.num_value_heads // self.num_key_heads

    @property
    def decay_dim(self) -> int:
        """Return the number of decays of a value head."""
        return self.key_dim if self.has_key_decay else 1


def pool_spec(shape: GatedDeltaShape, num_layers: int, num_slots: int) -> jax.ShapeDtypeStruct:
    """Return shape and dtype of a pool of `num_slots` slots per layer, the null slot counted."""
    size = (num_layers * num_slots, shape.num_value_heads, shape.key_dim, shape.value_dim)
    return jax.ShapeDtypeStruct(size, jnp.float32)
