"""Sort rows by the expert that multiplies them: each expert has a group of rows side by side."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax


class Groups(NamedTuple):
    """The rows of each expert, in the experts' order; each group's first row is a multiple of the alignment."""

    starts_e: Array
    """The first row of each expert, int32."""
    counts_e: Array
    """The number of rows of each expert, int32; 0 for an expert that no token chose."""


class Grouping(NamedTuple):
    """The groups of rows, and the maps from rows to tokens and from tokens' choices of experts to rows."""

    groups: Groups
    tokens_r: Array
    """The token of each row, int32; any token for rows that belong to no group."""
    experts_r: Array
    """The expert of each row, int32; any expert for rows that belong to no group."""
    rows_tj: Array
    """The row of each choice, int32; any row for choices that belong to no group."""


def capacity(num_choices: int, num_experts: int, alignment: int) -> int:
    """Return a number of rows, a multiple of the alignment, that fits any grouping of `num_choices` choices."""
    rows = num_choices + min(num_experts, num_choices) * (alignment - 1)
    return -(-rows // alignment) * alignment


def group_rows(experts_tj: Array, num_experts: int, alignment: int, num_tokens: Array | int) -> Grouping:
    """Sort the choices [t, j] of tokens by expert, in their order within each.

    Tokens from `num_tokens` on are padding: their choices belong to no group, and neither do choices of experts outside
    0 to `num_experts` - 1. There are `capacity(t * j, num_experts, alignment)` rows.
    """
    t, j = experts_tj.shape
    n, num_rows = t * j, capacity(t * j, num_experts, alignment)
    is_live_tj = (jnp.arange(t) < num_tokens)[:, None] & (experts_tj >= 0) & (experts_tj < num_experts)
    experts_n = jnp.where(is_live_tj, experts_tj, num_experts).reshape(n)
    counts_e = (experts_n[:, None] == jnp.arange(num_experts)).sum(axis=0, dtype=jnp.int32)
    padded_e = -(-counts_e // alignment) * alignment
    starts_e, firsts_e = (jnp.cumsum(sizes) - sizes for sizes in (padded_e, counts_e))
    # Distinct keys make the sort stable; a second sort replaces a scatter, which a TPU does one number at a time.
    order_n = lax.sort(experts_n * n + jnp.arange(n)) % n
    places_n = jnp.argsort(order_n, stable=False)
    shifts_e = starts_e - firsts_e
    rows_n = places_n + shifts_e[jnp.minimum(experts_n, num_experts - 1)]
    # The rows from one multiple of the alignment to the next belong to the last expert whose group begins at or before
    # it.
    slab_starts = jnp.arange(0, num_rows, alignment)
    slab_experts = (slab_starts[:, None] >= starts_e).sum(axis=1) - 1
    experts_r = jnp.repeat(slab_experts, alignment)
    places_r = jnp.arange(num_rows) - shifts_e[experts_r]
    tokens_r = order_n[jnp.clip(places_r, 0, n - 1)] // j
    rows_tj = jnp.clip(rows_n, 0, num_rows - 1).reshape(t, j)
    rows = (each.astype(jnp.int32) for each in (tokens_r, experts_r, rows_tj))
    # Otherwise a GPU computes a row's token anew for each number that it gathers of the row.
    rows = lax.optimization_barrier(tuple(rows))
    return Grouping(Groups(starts_e, counts_e), *rows)
