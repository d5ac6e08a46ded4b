"""The rows of a step, sorted by the slots of their adapters, once for all matmuls of the step."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array


class Rows(NamedTuple):
    """The slot of each row, 0 for none, and the rows sorted by slot, those with an adapter first."""

    slots_t: Array
    """The slot of each row, in the order of the rows."""
    order_t: Array
    """The numbers of the rows, sorted by slot from the last to the first; rows without a slot come last."""
    sorted_t: Array
    """The slots in that order."""
    num_adapted: Array
    """The number of rows that have an adapter."""


def sort_rows(slots_t: Array) -> Rows:
    """Sort rows by their slots, int32."""
    order_t = jnp.argsort(-slots_t, stable=True).astype(jnp.int32)
    return Rows(slots_t, order_t, slots_t[order_t], jnp.count_nonzero(slots_t).astype(jnp.int32))
