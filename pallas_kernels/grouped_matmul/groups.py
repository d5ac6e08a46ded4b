"""Sort rows by the expert that multiplies them: each expert has a group of rows side by side."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

_MOST_COUNTED = 4096
"""The most choices that a GPU orders by counting."""


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


class Sizes(NamedTuple):
    """The sizes of a grouping."""

    num_experts: int
    choices: int
    """The number of choices of a token."""
    alignment: int
    num_rows: int


def group_rows(experts_tj: Array, num_experts: int, alignment: int, num_tokens: Array | int) -> Grouping:
    """Sort the choices [t, j] of tokens by expert, in their order within each.

    Tokens from `num_tokens` on are padding: their choices belong to no group, and neither do choices of experts outside
    0 to `num_experts` - 1. There are `capacity(t * j, num_experts, alignment)` rows.
    """
    t, j = experts_tj.shape
    n, sizes = t * j, Sizes(num_experts, j, alignment, capacity(t * j, num_experts, alignment))
    is_live_tj = (jnp.arange(t) < num_tokens)[:, None] & (experts_tj >= 0) & (experts_tj < num_experts)
    experts_n = jnp.where(is_live_tj, experts_tj, num_experts).reshape(n).astype(jnp.int32)
    on_gpu = dict.fromkeys(("cuda", "rocm"), partial(by_counting, sizes=sizes)) if n <= _MOST_COUNTED else {}
    groups, tokens_r, rows_n = lax.platform_dependent(experts_n, **on_gpu, default=partial(by_sorting, sizes=sizes))
    experts_r = _experts_of_rows(groups.starts_e, sizes)
    # Otherwise a GPU computes a row's token anew for each number that it gathers of the row.
    tokens_r = lax.optimization_barrier(tokens_r)
    rows_tj = jnp.clip(rows_n, 0, sizes.num_rows - 1).reshape(t, j)
    return Grouping(groups, tokens_r, lax.optimization_barrier(experts_r), rows_tj)


class _Order(NamedTuple):
    """The order of choices n, int32."""

    groups: Groups
    tokens_r: Array
    """The token of each row; any token for rows that belong to no group."""
    rows_n: Array
    """The row of each choice; any number for choices that belong to no group."""


def by_sorting(experts_n: Array, sizes: Sizes) -> _Order:
    """Order choices by two sorts. Those of expert `num_experts` belong to no group."""
    n = len(experts_n)
    counts_e = (experts_n[:, None] == jnp.arange(sizes.num_experts)).sum(axis=0, dtype=jnp.int32)
    padded_e = -(-counts_e // sizes.alignment) * sizes.alignment
    starts_e, firsts_e = (jnp.cumsum(each) - each for each in (padded_e, counts_e))
    # Distinct keys make the sort stable; a second sort replaces a scatter, which a TPU does one number at a time.
    order_n = lax.sort(experts_n * n + jnp.arange(n, dtype=jnp.int32)) % n
    places_n = jnp.argsort(order_n, stable=False)
    shifts_e = starts_e - firsts_e
    rows_n = places_n + shifts_e[jnp.minimum(experts_n, sizes.num_experts - 1)]
    places_r = jnp.arange(sizes.num_rows, dtype=jnp.int32) - shifts_e[_experts_of_rows(starts_e, sizes)]
    return _Order(Groups(starts_e, counts_e), order_n[jnp.clip(places_r, 0, n - 1)] // sizes.choices, rows_n)


def by_counting(experts_n: Array, sizes: Sizes) -> _Order:
    """Order choices as `by_sorting` does, by comparing each with all others: a GPU launches a kernel for each sum.

    The number of comparisons grows with the square of n.
    """
    n = len(experts_n)
    numbers_n, numbers_e, numbers_r = (
        jnp.arange(size, dtype=jnp.int32) for size in (n, sizes.num_experts, sizes.num_rows)
    )
    # Sums q for each choice, and then for each expert: padding fuses with them, concatenating might not.
    numbers_q = jnp.arange(n + sizes.num_experts, dtype=jnp.int32)
    experts_q = jnp.where(numbers_q < n, jnp.pad(experts_n, (0, sizes.num_experts)), numbers_q - n)
    is_before_qn = (experts_n == experts_q[:, None]) & (numbers_n < numbers_q[:, None])
    places_n, counts_e = jnp.split(is_before_qn.sum(axis=1, dtype=jnp.int32), [n])
    padded_e = divide_up(counts_e, sizes.alignment) * sizes.alignment
    places_q = jnp.pad(places_n, (0, sizes.num_experts))
    starts_qe = jnp.where(numbers_e < experts_q[:, None], padded_e, 0)
    rows_q = (starts_qe + jnp.where(numbers_e == 0, places_q[:, None], 0)).sum(axis=1, dtype=jnp.int32)
    rows_n, starts_e = jnp.split(lax.optimization_barrier(rows_q), [n])
    tokens_rn = jnp.where(rows_n == numbers_r[:, None], lax.div(numbers_n, jnp.int32(sizes.choices)), 0)
    return _Order(Groups(starts_e, counts_e), tokens_rn.sum(axis=1, dtype=jnp.int32), rows_n)


def divide_up(counts: Array, size: int) -> Array:
    """Return non-negative counts divided by a size, rounded up.

    The division is of unsigned numbers: XLA:GPU gives one of signed numbers a launch of its own.
    """
    return lax.div((counts + (size - 1)).astype(jnp.uint32), jnp.uint32(size)).astype(jnp.int32)


def _experts_of_rows(starts_e: Array, sizes: Sizes) -> Array:
    """Return the expert of each row.

    The rows from one multiple of the alignment to the next belong to the last expert whose group begins at or before
    it.
    """
    slab_starts = jnp.arange(0, sizes.num_rows, sizes.alignment)
    slab_experts = (slab_starts[:, None] >= starts_e).sum(axis=1, dtype=jnp.int32) - 1
    return jnp.repeat(slab_experts, sizes.alignment)
