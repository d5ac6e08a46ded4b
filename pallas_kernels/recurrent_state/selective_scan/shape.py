"""The shape of a layer, for which the op is compiled, and its pool."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

_MOST_LANES = 128


class SelectiveScanShape(NamedTuple):
    """The shape that the op is compiled for, besides the batch. Its dtype is numpy's, so that equal shapes are one."""

    num_channels: int
    state_dim: int
    """The numbers of a channel's state."""
    dtype: Any
    """The dtype of x, b, c and the output. All else is float32."""

    @property
    def lanes(self) -> int:
        """Return the number of channels that lie side by side in the pool, a TPU's lanes if they divide."""
        return math.gcd(self.num_channels, _MOST_LANES)

    @property
    def state(self) -> tuple[int, int, int]:
        """Return the shape of a sequence's state: parts of `lanes` channels, the numbers of a state, channels."""
        return self.num_channels // self.lanes, self.state_dim, self.lanes


def pool_spec(shape: SelectiveScanShape, num_layers: int, num_slots: int) -> jax.ShapeDtypeStruct:
    """Return shape and dtype of a pool of `num_slots` slots per layer, the null slot counted."""
    return jax.ShapeDtypeStruct((num_layers * num_slots, *shape.state), jnp.float32)
