"""Choose the best experts of each token.

XLA sorts for `lax.top_k`. On a GPU a sort takes several launches, which cost more than comparing each
expert with all others, as long as tokens are few.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

_MOST_COMPARED = 2**25
"""The most comparisons by which a GPU ranks experts."""


def top_experts(ranked_te: Array, scores_te: Array, count: int) -> tuple[Array, Array]:
    """Return each token's `count` experts that rank highest, int32 [t, j], the best one first, and their scores.

    Of experts that rank equal the first one is best. Both arguments are float32.
    """
    sort, compare = partial(top_by_sorting, count=count), partial(top_by_comparing, count=count)
    return _choose(sort, compare, ranked_te, scores_te)


def within_groups(ranked_te: Array, num_groups: int, top_groups: int, group_best: int) -> Array:
    """Return the ranks with -inf for all experts except those of each token's best groups.

    Groups have equal sizes, and are ranked by the sum of their `group_best` best experts, one or two.
    """
    if top_groups == num_groups:
        return ranked_te
    counts = {"top_groups": top_groups, "group_best": group_best}
    ranked_tge = ranked_te.reshape(len(ranked_te), num_groups, -1)
    sort, compare = partial(groups_by_sorting, **counts), partial(groups_by_comparing, **counts)
    is_chosen_tg = _choose(sort, compare, ranked_tge)
    return jnp.where(is_chosen_tg[:, :, None], ranked_tge, -jnp.inf).reshape(ranked_te.shape)


def _choose(sort: Callable[..., Any], compare: Callable[..., Any], *arrays: Array) -> Any:
    """Return `compare(*arrays)` on a GPU if there is little to compare, and `sort(*arrays)` elsewhere."""

    def compare_once(*arrays: Array) -> Any:
        """Compare numbers that are in memory: computed twice they might differ, and each of two experts be first."""
        return compare(*lax.optimization_barrier(arrays))

    is_little = arrays[0].size * arrays[0].shape[-1] <= _MOST_COMPARED
    on_gpu = dict.fromkeys(("cuda", "rocm"), compare_once) if is_little else {}
    return lax.platform_dependent(*arrays, **on_gpu, default=sort)


def top_by_sorting(ranked_te: Array, scores_te: Array, count: int) -> tuple[Array, Array]:
    """See `top_experts`."""
    experts_tj = lax.top_k(ranked_te, count)[1]
    return experts_tj, jnp.take_along_axis(scores_te, experts_tj, axis=1)


def top_by_comparing(ranked_te: Array, scores_te: Array, count: int) -> tuple[Array, Array]:
    """See `top_experts`; two sums, and a launch for each."""
    places_te, numbers_e = _places(ranked_te), jnp.arange(ranked_te.shape[1], dtype=jnp.int32)
    is_chosen_tje = places_te[:, None] == jnp.arange(count, dtype=jnp.int32)[:, None]
    experts_tj = jnp.where(is_chosen_tje, numbers_e, 0).sum(axis=2, dtype=jnp.int32)
    return experts_tj, jnp.where(is_chosen_tje, scores_te[:, None], 0).sum(axis=2)


def groups_by_sorting(ranked_tge: Array, top_groups: int, group_best: int) -> Array:
    """Return the chosen groups, bool [t, g]."""
    best_tg = jnp.sum(lax.top_k(ranked_tge, group_best)[0], axis=-1)
    return jax.nn.one_hot(lax.top_k(best_tg, top_groups)[1], ranked_tge.shape[1]).sum(axis=1) > 0


def groups_by_comparing(ranked_tge: Array, top_groups: int, group_best: int) -> Array:
    """Return the chosen groups, bool [t, g]; three sums, and a launch for each."""
    best_tg = jnp.where(_places(ranked_tge) < group_best, ranked_tge, 0).sum(axis=2)
    return _places(best_tg) < top_groups


def _places(values: Array) -> Array:
    """Return the place of each number among those of its row, which end in the last axis: 0 for the highest."""
    numbers = jnp.arange(values.shape[-1], dtype=jnp.int32)
    # Ordered as floats are, with NaN at the ends, so that each number has a place of its own whatever they are.
    keys = lax.bitcast_convert_type(values, jnp.int32)
    keys = jnp.where(keys < 0, keys ^ jnp.int32(2**31 - 1), keys)
    others, keys = keys[..., None, :], keys[..., None]
    is_better = (others > keys) | (others == keys) & (numbers < numbers[:, None])
    return is_better.sum(axis=-1, dtype=jnp.int32)
