"""Cut the rows of each expert into spans, which a kernel works through one after the other."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from .groups import Groups, divide_up


class Spans(NamedTuple):
    """The spans, in the order of the experts; int32 arrays, whose entries after the last span may hold anything."""

    ends_e: Array
    """One past the last span of each expert."""
    experts_n: Array
    rows_n: Array
    """The first row of each span."""
    counts_n: Array
    """The number of rows of each span."""
    places_n: Array
    """The index of each span among its expert's spans."""
    siblings_n: Array
    """The number of spans of the expert of each span."""

    @property
    def total(self) -> Array:
        """Return the number of spans, a scalar."""
        return self.ends_e[-1]


def cut(groups: Groups, num_rows: int, alignment: int, most: int) -> Spans:
    """Cut the rows of each expert, which begin at multiples of `alignment`, into spans of `most` rows or fewer."""
    num_experts, num_slabs = groups.counts_e.shape[0], num_rows // alignment
    experts_e = lax.iota(jnp.int32, num_experts)
    spans_e = divide_up(groups.counts_e, most)
    # Sums over masks instead of a cumulative sum and gathers: a GPU launches one kernel for the first, and one for all
    # others.
    ends_e = jnp.where(experts_e[None] <= experts_e[:, None], spans_e[None], 0).sum(axis=1, dtype=jnp.int32)
    number_n = lax.iota(jnp.int32, min(num_slabs, min(num_experts, num_slabs) + num_rows // most))
    places_ne = number_n[:, None] - (ends_e - spans_e)[None]
    is_of_ne = (places_ne >= 0) & (places_ne < spans_e[None])

    def pick(values_ne: Array) -> Array:
        """Return the number of each span's expert, 0 after the last span."""
        return jnp.where(is_of_ne, values_ne, 0).sum(axis=1, dtype=jnp.int32)

    return Spans(
        ends_e=ends_e,
        experts_n=pick(experts_e[None]),
        rows_n=pick(groups.starts_e[None] + places_ne * most),
        counts_n=pick(jnp.minimum(groups.counts_e[None] - places_ne * most, most)),
        places_n=pick(places_ne),
        siblings_n=pick(spans_e[None]),
    )
