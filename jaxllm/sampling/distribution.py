"""Convert logits to unnormalised probabilities, element by element, so that no array of them need exist."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

GREEDY_TEMPERATURE = 1e-5
_MAX_TEMPERATURE = 1e30  # its inverse is still a normal float32: 0 x inf is NaN


class Distribution(NamedTuple):
    """The unnormalised probabilities of each row: the mass of an id follows from its logit."""

    temperature_s: Array
    largest_s: Array
    """Each row's largest logit, which has mass 1."""
    min_logit_s: Array
    """Lower logits have mass 0."""

    def scaled(self, logits: Array) -> Array:
        """Divide logits [s, ...] by the temperature; logits that are cut off become -inf."""
        scale = 1.0 / jnp.clip(self.temperature_s, GREEDY_TEMPERATURE, _MAX_TEMPERATURE)
        return jnp.where(logits >= _like(self.min_logit_s, logits), logits * _like(scale, logits), -jnp.inf)

    def mass(self, logits: Array) -> Array:
        """Return the mass of logits [s, ...], in [0, 1]."""
        largest = _like(self.largest_s, logits)
        scale = 1.0 / jnp.clip(self.temperature_s, GREEDY_TEMPERATURE, _MAX_TEMPERATURE)
        mass = jnp.exp((logits - largest) * _like(scale, logits))
        # The largest has mass 1 even if it is infinite, or if all are -inf.
        mass = jnp.where(logits == largest, 1.0, mass)
        return jnp.where(logits >= _like(self.min_logit_s, logits), mass, 0.0)


def is_greedy(temperature_s: Array) -> Array:
    """Return which rows take their most likely id."""
    return temperature_s < GREEDY_TEMPERATURE


def _like(values_s: Array, logits: Array) -> Array:
    return values_s.reshape(-1, *[1] * (logits.ndim - 1))
