"""The rows of a step by the slots of their adapters, sorted once for all matmuls of the step."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array


class Rows(NamedTuple):
    """The slot of each row, 0 for none, and the rows in the order of their slots, those with an adapter first."""

    slots_t: Array
    """The slot of each row, as the rows lie."""
    order_t: Array
    """Row numbers in order: those of the last slot first, rows of no slot last, those of one slot in their own."""
    sorted_t: Array
    """The slots in that order."""
    num_adapted: Array
    """How many rows have an adapter."""


def sort_rows(slots_t: Array) -> Rows:
    """Sort rows by their slots, int32."""
    order_t = jnp.argsort(-slots_t, stable=True).astype(jnp.int32)
    return Rows(slots_t, order_t, slots_t[order_t], jnp.count_nonzero(slots_t).astype(jnp.int32))
