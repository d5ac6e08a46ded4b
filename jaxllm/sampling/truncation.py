"""Truncate by top_k, top_p and min_p with a search for thresholds instead of a sort.

The bits of floats, read as integers, have the order of the floats, so a search over the bits ends at the exact
threshold. A CPU searches by halving, row by row, and stops when a row is done. Other platforms find four bits of all
rows at a time, in a fixed number of rounds. On a GPU they are no loop, which the host would drive outside of the step's
CUDA graph. Ids as likely as the threshold are all kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jaxllm.sampling.distribution import Distribution

_INF_BITS = 0x7F800000
_ONE_BITS = 0x3F800000  # of 1.0, the largest mass
_LEAST = jnp.finfo(jnp.float32).tiny  # devices take smaller numbers for 0
_MASS_TOLERANCE = 5e-7  # of a row's mass: float32 sums of a vocabulary are no better
_NUM_PARTS = 8
_ROUND_BITS = 4
_GPU_TILE = 1024  # ids that a warp adds up

type _Sum = Callable[[Sequence[Array]], Sequence[Array]]
"""A function that adds up the rows of arrays [s, v], and returns [s] for each."""


class _Floats(NamedTuple):
    """Floats as integers that have their order, from `low` to `high`, which is the first integer beyond."""

    low: int
    high: int
    to_float: Callable[[Array], Array]


class _Search(Protocol):
    """A search for the largest float at which each row keeps enough; the lowest one for unused rows."""

    def __call__(
        self,
        uses_s: Array,
        floats: _Floats,
        kept_at: Callable[[Sequence[Array]], Sequence[Array]],
        *,
        wanted_s: Array,
        slack: Callable[[Array], Array],
    ) -> Array:
        """Return that float, or a lower one with at most `slack` in between, which is no other id.

        Args:
          uses_s: which rows search.
          floats: the candidates. At the lowest enough is kept.
          kept_at: returns the mass or count [s] that each row keeps at each of some floats [s]; it falls as they grow.
          wanted_s: the mass or count that each row must keep, more than 0.
          slack: returns the mass or count that may lie in between, at a float.
        """
        ...


class _Bounds(NamedTuple):
    """The bounds of each row's threshold, as integers, and the mass or count kept at either."""

    low_s: Array
    kept_at_low_s: Array
    high_s: Array
    kept_at_high_s: Array


def truncate(
    logits_sv: Array,
    distribution: Distribution,
    top_k_s: Array,
    top_p_s: Array,
    min_p_s: Array,
    *,
    is_used: Array | bool,
) -> Array:
    """Return the least logit of each row that min_p, top_k and then top_p keep.

    Args:
      logits_sv: float32.
      distribution: of untruncated logits.
      top_k_s: keep the k largest; 0 and less keep all.
      top_p_s: keep the fewest largest that reach this share of the mass that the other two left.
      min_p_s: drop ids less likely than this share of the most likely id's probability.
      is_used: whether any row truncates; on a CPU nothing is computed otherwise.
    """
    arrays = (logits_sv, distribution, top_k_s, top_p_s, min_p_s)
    num_rows = logits_sv.shape[0]

    def one_row(row: Array, least_s: Array) -> Array:
        sliced = jax.tree.map(lambda array: lax.dynamic_slice_in_dim(array, row, 1), arrays)
        found_s = _truncate(*sliced, search=_bisect, add_up=_sum_in_parts)
        return lax.dynamic_update_slice_in_dim(least_s, found_s, row, 0)

    # Row by row on CPU: a row stays in the core's cache and stops when it is done. At 64 x 49k, 16 halvings take 5 ms,
    # against 27 ms for all rows at once.
    return lax.platform_dependent(
        cpu=lambda: lax.fori_loop(0, jnp.where(is_used, num_rows, 0), one_row, jnp.full(num_rows, -jnp.inf)),
        tpu=lambda: _truncate(*arrays, search=_search_in_rounds, add_up=_sum_each),
        default=lambda: _truncate(*arrays, search=partial(_search_in_rounds, unroll=True), add_up=_sum_together),
    )


def _truncate(
    logits_sv: Array,
    distribution: Distribution,
    top_k_s: Array,
    top_p_s: Array,
    min_p_s: Array,
    *,
    search: _Search,
    add_up: _Sum,
) -> Array:
    v = logits_sv.shape[1]
    least_s = search(
        (top_k_s > 0) & (top_k_s < v),
        _Floats(~_INF_BITS, _INF_BITS + 1, _from_key),
        lambda tried: add_up([jnp.where(logits_sv >= tried_s[:, None], 1.0, 0.0) for tried_s in tried]),
        wanted_s=top_k_s.astype(jnp.float32),
        slack=lambda _: jnp.float32(1.0),
    )
    mass_sv = distribution._replace(min_logit_s=least_s).mass(logits_sv)
    # Computed once, not at every float that is tried.
    mass_sv = lax.optimization_barrier(jnp.where(mass_sv >= min_p_s[:, None], mass_sv, 0.0))
    [total_s] = add_up([mass_sv])
    least_mass_s = search(
        top_p_s < 1.0,
        _Floats(0, _ONE_BITS + 1, _from_bits),
        lambda tried: add_up([jnp.where(mass_sv >= tried_s[:, None], mass_sv, 0.0) for tried_s in tried]),
        wanted_s=jnp.maximum(top_p_s * total_s, _LEAST),
        # Less than two ids of this mass, or no more than the rounding error.
        slack=lambda mass_s: jnp.maximum(1.5 * mass_s, _MASS_TOLERANCE * total_s),
    )
    kept_sv = (mass_sv >= jnp.maximum(min_p_s, least_mass_s)[:, None]) & (logits_sv >= least_s[:, None])
    return jnp.where(kept_sv, logits_sv, jnp.inf).min(axis=1)


def _bisect(
    uses_s: Array,
    floats: _Floats,
    kept_at: Callable[[Sequence[Array]], Sequence[Array]],
    *,
    wanted_s: Array,
    slack: Callable[[Array], Array],
) -> Array:
    """Search by halving, until every row is done; see `_Search`."""

    def is_open(at: _Bounds) -> Array:
        between_s = at.kept_at_low_s - at.kept_at_high_s
        return uses_s & (at.low_s + 1 < at.high_s) & ~(between_s <= slack(floats.to_float(at.low_s)))

    def halve(at: _Bounds) -> _Bounds:
        # Their sum may be more than an int32 holds.
        middle_s = (at.low_s >> 1) + (at.high_s >> 1) + (at.low_s & at.high_s & 1)
        [kept_s] = kept_at([floats.to_float(middle_s)])
        # A row's result must not depend on the number of rounds of others.
        is_open_s = is_open(at)
        is_low_s = is_open_s & (kept_s >= wanted_s)
        is_high_s = is_open_s & ~is_low_s
        return _Bounds(
            jnp.where(is_low_s, middle_s, at.low_s),
            jnp.where(is_low_s, kept_s, at.kept_at_low_s),
            jnp.where(is_high_s, middle_s, at.high_s),
            jnp.where(is_high_s, kept_s, at.kept_at_high_s),
        )

    low_s, high_s = (jnp.full(uses_s.shape, bound, jnp.int32) for bound in (floats.low, floats.high))
    start = _Bounds(low_s, jnp.full(uses_s.shape, jnp.inf), high_s, jnp.zeros(uses_s.shape))
    return floats.to_float(lax.while_loop(lambda at: is_open(at).any(), halve, start).low_s)


def _search_in_rounds(
    uses_s: Array,
    floats: _Floats,
    kept_at: Callable[[Sequence[Array]], Sequence[Array]],
    *,
    wanted_s: Array,
    slack: Callable[[Array], Array],
    unroll: bool = False,
) -> Array:
    """Search by trying 15 floats in each of 8 rounds; see `_Search`. With `unroll` the program has no loop."""
    del slack  # it finds the largest
    # Integers are relative to low: the range may be more than an int32 holds.
    low, size = np.uint32(floats.low % 2**32), np.uint32(floats.high - floats.low)
    counts = np.arange(1, 2**_ROUND_BITS, dtype=np.uint32)

    def to_float(offsets: Array) -> Array:
        return floats.to_float(lax.bitcast_convert_type(low + offsets, jnp.int32))

    def find_bits(_: Array, state: tuple[Array, Array]) -> tuple[Array, Array]:
        offset_s, step_s = state
        # At `high` nothing is kept.
        tried = [to_float(jnp.minimum(offset_s + count * step_s, size)) for count in counts]
        # Behind the barrier the rounds are one computation, which a GPU's compiler compiles once.
        tried, offset_s, step_s = lax.optimization_barrier((tried, offset_s, step_s))
        num_kept_s = jnp.zeros_like(offset_s)
        for kept_s in kept_at(tried):
            # If a float is too large, all larger ones are.
            num_kept_s += (kept_s >= wanted_s).astype(jnp.uint32)
        return offset_s + num_kept_s * step_s, step_s >> np.uint32(_ROUND_BITS)

    # Rows that do not search stay at the lowest.
    step_s = jnp.where(uses_s, np.uint32(1 << 32 - _ROUND_BITS), np.uint32(0))
    state = (jnp.zeros_like(step_s), step_s)
    return to_float(lax.fori_loop(0, 32 // _ROUND_BITS, find_bits, state, unroll=unroll)[0])


def _sum_each(arrays: Sequence[Array]) -> Sequence[Array]:
    """Add up rows of one array after another."""
    return [values_sv.sum(axis=1) for values_sv in arrays]


def _sum_together(arrays: Sequence[Array]) -> Sequence[Array]:
    """Add up rows of all arrays in two kernels of a GPU, and read what the arrays are computed from once."""
    padding = ((0, 0), (0, -arrays[0].shape[1] % _GPU_TILE))
    tiles = [jnp.pad(values_sv, padding).reshape(len(values_sv), -1, _GPU_TILE) for values_sv in arrays]
    return _sum_last_axes(_sum_last_axes(tiles))


def _sum_last_axes(arrays: Sequence[Array]) -> Sequence[Array]:
    """Add up the last axis of arrays of one shape in one operation."""

    def add(sums: Sequence[Array], values: Sequence[Array]) -> tuple[Array, ...]:
        return tuple(map(jnp.add, sums, values))

    return lax.reduce(tuple(arrays), (jnp.float32(0.0),) * len(arrays), add, (arrays[0].ndim - 1,))


def _sum_in_parts(arrays: Sequence[Array]) -> Sequence[Array]:
    """Add up rows, first in parts, element by element: otherwise XLA:CPU adds one number after another."""
    return [_sum_row_parts(values_sv) for values_sv in arrays]


def _sum_row_parts(values_sv: Array) -> Array:
    parts_sv = jnp.pad(values_sv, ((0, 0), (0, -values_sv.shape[1] % _NUM_PARTS)))
    width = parts_sv.shape[1] // _NUM_PARTS
    total_sv = parts_sv[:, :width]
    for start in range(width, parts_sv.shape[1], width):
        total_sv = total_sv + parts_sv[:, start : start + width]
    return lax.optimization_barrier(total_sv).sum(axis=1)


def _from_key(keys: Array) -> Array:
    """Return the float of an integer; the integers have the order of their floats, negative ones too."""
    return _from_bits(jnp.where(keys >= 0, keys, jnp.int32(-(2**31)) | ~keys))


def _from_bits(bits: Array) -> Array:
    return lax.bitcast_convert_type(bits, jnp.float32)
