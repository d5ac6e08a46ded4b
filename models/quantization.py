"""Weights held as 8-bit integers, with a scale per output channel; activations are not quantized."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

METHODS = ("int8",)
LARGEST = 127
"""The largest integer; the smallest is -127."""


class Quantized(NamedTuple):
    """A weight [*out, *in] equals values * scales; the fields may be specs instead of arrays."""

    values: Any
    """int8 [*out, *in]."""
    scales: Any
    """float32 [*out]; they are applied to sums over the inputs."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the weight's shape."""
        return self.values.shape

    @property
    def ndim(self) -> int:
        """Return the weight's number of axes."""
        return self.values.ndim


def quantize(weight: Array, num_inputs: int) -> Quantized:
    """Round a weight whose last `num_inputs` axes are summed over: each channel's largest becomes 127 or -127."""
    weight, inputs = weight.astype(jnp.float32), tuple(range(-num_inputs, 0))
    scales = jnp.max(jnp.abs(weight), axis=inputs, keepdims=True) / LARGEST
    values = jnp.round(weight / jnp.where(scales == 0, 1, scales)).astype(jnp.int8)
    return Quantized(values, scales.squeeze(inputs))
