"""Cut the rows of each expert into spans, which a kernel works through one after the other."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from .groups import Groups


class Spans(NamedTuple):
    """The spans, in the order of the experts; int32 arrays, whose entries after the last span may hold anything."""

    total: Array
    """The number of spans, a scalar."""
    experts_n: Array
    rows_n: Array
    """The first row of each span."""
    counts_n: Array
    """The number of rows of each span."""
    places_n: Array
    """The index of each span among its expert's spans."""
    siblings_n: Array
    """The number of spans of the expert of each span."""


def cut(groups: Groups, num_rows: int, alignment: int, most: int) -> Spans:
    """Cut the rows of each expert, which begin at multiples of `alignment`, into spans of `most` rows or fewer."""
    num_experts, num_slabs = groups.counts_e.shape[0], num_rows // alignment
    spans_e = -(-groups.counts_e // most)
    ends_e = jnp.cumsum(spans_e)
    number_n = lax.iota(jnp.int32, min(num_slabs, min(num_experts, num_slabs) + num_rows // most))
    expert_n = jnp.minimum((number_n[:, None] >= ends_e).sum(axis=1, dtype=jnp.int32), num_experts - 1)
    place_n = number_n - (ends_e - spans_e)[expert_n]
    return Spans(
        total=ends_e[-1],
        experts_n=expert_n,
        rows_n=groups.starts_e[expert_n] + place_n * most,
        counts_n=jnp.clip(groups.counts_e[expert_n] - place_n * most, 0, most),
        places_n=place_n,
        siblings_n=spans_e[expert_n],
    )
