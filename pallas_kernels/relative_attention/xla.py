"""Relative attention in plain `jax.numpy`, in tiles of queries and of keys with a running softmax.

Tiles begin at multiples of their size after a sequence's first token, so a row's bits do not depend on other sequences.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from .buckets import bucket_rows

_MASKED = -1e30
_TILE = 64


class _Softmax(NamedTuple):
    """The softmax of a tile's rows over the keys so far."""

    max_nq: Array
    sum_nq: Array
    acc_nqh: Array


def xla_relative_attention(
    q_tnh: Array,
    k_tnh: Array,
    v_tnh: Array,
    q_rnh: Array,
    k_rnh: Array,
    starts_s: Array,
    ends_s: Array,
    *,
    scale: float,
    max_distance: int | None,
    longest: int,
) -> Array:
    """See `RelativeAttention`."""
    (t, n, h), tile = q_tnh.shape, _TILE
    # By default a GPU rounds float32 operands to 11 bits, and a TPU to 8.
    precision = lax.Precision.HIGHEST if q_tnh.dtype == jnp.float32 else None
    multiply = partial(jnp.einsum, precision=precision, preferred_element_type=jnp.float32)
    # One row for each distance, in both orders, so that those of a tile are consecutive.
    reach = -(-longest // tile) * tile
    distances = np.arange(-reach, reach + 1)
    up_ndh, down_ndh = (
        x_rnh[bucket_rows(d, len(x_rnh) // 2, max_distance)].swapaxes(0, 1)
        for x_rnh, d in ((q_rnh, distances), (k_rnh, -distances))
    )
    q_nth, k_nth, v_nth = (jnp.pad(x, ((0, tile), (0, 0), (0, 0))).swapaxes(0, 1) for x in (q_tnh, k_tnh, v_tnh))

    def cut(x: Array, first: Array, size: int = tile) -> Array:
        return lax.dynamic_slice_in_dim(x, first, size, axis=1)

    def attend(start: Array, end: Array, number: Array, out_nth: Array) -> Array:
        row = start + number * tile
        q_nqh = cut(q_nth, row)

        def body(i: Array, state: _Softmax) -> _Softmax:
            key = start + i * tile
            is_seen_c = key + jnp.arange(tile, dtype=jnp.int32) < end
            k_nch, v_nch = cut(k_nth, key), jnp.where(is_seen_c[:, None], cut(v_nth, key), 0)
            by_query_nqd = multiply("nqh,ndh->nqd", q_nqh, cut(down_ndh, key - row - tile + 1 + reach, 2 * tile))
            by_key_ncd = multiply("nch,ndh->ncd", k_nch, cut(up_ndh, row - key - tile + 1 + reach, 2 * tile))
            scores_nqc = multiply("nqh,nch->nqc", q_nqh, k_nch) + _skew(by_query_nqd) + _skew(by_key_ncd).swapaxes(1, 2)
            scores_nqc = jnp.where(is_seen_c, scores_nqc * scale, _MASKED)
            # The first key of a tile is always seen.
            max_nq = jnp.maximum(state.max_nq, scores_nqc.max(axis=-1))
            probs_nqc, decay_nq = jnp.exp(scores_nqc - max_nq[..., None]), jnp.exp(state.max_nq - max_nq)
            acc_nqh = multiply("nqc,nch->nqh", probs_nqc.astype(v_nch.dtype), v_nch)
            return _Softmax(
                max_nq, state.sum_nq * decay_nq + probs_nqc.sum(axis=-1), state.acc_nqh * decay_nq[..., None] + acc_nqh
            )

        nothing = _Softmax(jnp.full((n, tile), _MASKED), jnp.zeros((n, tile)), jnp.zeros((n, tile, h)))
        state = lax.fori_loop(0, _num_tiles(start, end), body, nothing)
        is_used_q = row + jnp.arange(tile, dtype=jnp.int32) < end
        new_nqh = (state.acc_nqh / state.sum_nq[..., None]).astype(out_nth.dtype)
        new_nqh = jnp.where(is_used_q[:, None], new_nqh, cut(out_nth, row))
        return lax.dynamic_update_slice_in_dim(out_nth, new_nqh, row, axis=1)

    def attend_sequence(number: Array, out_nth: Array) -> Array:
        start, end = starts_s[number], ends_s[number]
        return lax.fori_loop(0, _num_tiles(start, end), partial(attend, start, end), out_nth)

    used_s = jnp.where(starts_s < ends_s, jnp.arange(1, len(ends_s) + 1), 0)
    return lax.fori_loop(0, used_s.max(), attend_sequence, jnp.zeros_like(q_nth))[:, :t].swapaxes(0, 1)


def _num_tiles(start: Array, end: Array) -> Array:
    return (end - start + _TILE - 1) // _TILE


def _skew(x_nid: Array) -> Array:
    """Return [n, i, j] of products with consecutive distances [n, i, 2i]; the one of i and j is at j - i + size - 1.

    Each row begins one place earlier than the row before it: in rows that are one shorter, all begin at the same place.
    """
    n, size, _ = x_nid.shape
    flat_nx = x_nid.reshape(n, -1)[:, size - 1 : size - 1 + size * (2 * size - 1)]
    return flat_nx.reshape(n, size, 2 * size - 1)[..., :size]
