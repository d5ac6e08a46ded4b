"""The shape of a layer, for which the op is compiled, and its pool."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax


class ConvShape(NamedTuple):
    """The shape that the op is compiled for, besides the batch. Its dtype is numpy's, so that equal shapes are one."""

    num_channels: int
    kernel_size: int
    """The number of tokens that each output depends on; the last is its own."""
    dtype: Any
    """The dtype of x, weights, states and the output."""


def pool_spec(shape: ConvShape, num_layers: int, num_slots: int) -> jax.ShapeDtypeStruct:
    """Return shape and dtype of a pool of `num_slots` slots per layer, the null slot counted."""
    return jax.ShapeDtypeStruct((num_layers * num_slots, shape.kernel_size - 1, shape.num_channels), shape.dtype)
