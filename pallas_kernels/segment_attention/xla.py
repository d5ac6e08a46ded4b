"""Segment attention in plain `jax.numpy`, in tiles of queries and of keys with a running softmax.

A tile of queries goes over the tiles of keys from its first start to its last end. There are two ways to loop over
them: as often as is needed, and, for GPUs, as often as may be needed: such a loop does not wait until the host has read
its bounds.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

_MASKED = -1e30
_TILE = 256
"""Rows of a tile: its scores take 4 MB with 16 heads."""
_COUNTED_TILE = 1024
"""Rows of a tile of counted loops, whose iterations are several launches each: its scores take 64 MB with 16 heads."""


class _Softmax(NamedTuple):
    """The softmax of a tile's rows over the keys so far."""

    max_nq: Array
    sum_nq: Array
    acc_nqh: Array


def xla_segment_attention(
    q_pnh: Array, k_pnh: Array, v_pnh: Array, starts_p: Array, ends_p: Array, *, scale: float, longest: int
) -> Array:
    """See `SegmentAttention`."""
    del longest
    return _attend(q_pnh, k_pnh, v_pnh, starts_p, ends_p, scale=scale, tile=_TILE, num_tiles=None)


def xla_counted_segment_attention(
    q_pnh: Array, k_pnh: Array, v_pnh: Array, starts_p: Array, ends_p: Array, *, scale: float, longest: int
) -> Array:
    """See `SegmentAttention`; the lengths of loops do not depend on the segments."""
    # The rows of a tile see less than `longest` rows on either side of it.
    num_tiles = 1 + 2 * -(-(longest - 1) // _COUNTED_TILE)
    return _attend(q_pnh, k_pnh, v_pnh, starts_p, ends_p, scale=scale, tile=_COUNTED_TILE, num_tiles=num_tiles)


def _attend(
    q_pnh: Array,
    k_pnh: Array,
    v_pnh: Array,
    starts_p: Array,
    ends_p: Array,
    *,
    scale: float,
    tile: int,
    num_tiles: int | None,
) -> Array:
    """Attend; `num_tiles` is the most tiles of keys that a tile of queries sees, or None to loop as often as needed."""
    p, n, h = q_pnh.shape
    tile = min(tile, p)
    is_used_p = starts_p < ends_p
    # 0 x NaN is NaN.
    v_pnh = jnp.where(is_used_p[:, None, None], v_pnh, 0)
    padding = -p % tile
    most = (p + padding) // tile
    q_pnh, k_pnh, v_pnh = (jnp.pad(x, ((0, padding), (0, 0), (0, 0))) for x in (q_pnh, k_pnh, v_pnh))
    k_nph, v_nph = k_pnh.swapaxes(0, 1), v_pnh.swapaxes(0, 1)
    starts_p, ends_p = jnp.pad(starts_p, (0, padding)), jnp.pad(ends_p, (0, padding))
    # By default a GPU rounds float32 operands to 11 bits, and a TPU to 8.
    precision = lax.Precision.HIGHEST if q_pnh.dtype == jnp.float32 else None
    multiply = partial(jnp.einsum, precision=precision, preferred_element_type=jnp.float32)

    def attend(number: Array, x_pnh: Array) -> Array:
        q_nqh = lax.dynamic_slice_in_dim(x_pnh, number * tile, tile).swapaxes(0, 1)
        starts_q, ends_q = (lax.dynamic_slice_in_dim(x, number * tile, tile) for x in (starts_p, ends_p))
        first = jnp.where(starts_q < ends_q, starts_q, p).min() // tile

        def body(i: Array, state: _Softmax) -> _Softmax:
            k_nch, v_nch = (lax.dynamic_slice_in_dim(x, i * tile, tile, axis=1) for x in (k_nph, v_nph))
            rows_c = i * tile + jnp.arange(tile, dtype=jnp.int32)
            is_seen_qc = (rows_c[None] >= starts_q[:, None]) & (rows_c[None] < ends_q[:, None])
            scores_nqc = jnp.where(is_seen_qc[None], multiply("nqh,nch->nqc", q_nqh, k_nch) * scale, _MASKED)
            max_nq = jnp.maximum(state.max_nq, scores_nqc.max(axis=-1))
            # _MASKED - _MASKED is 0: rows that have seen nothing yet must not count masked scores as exp(0).
            probs_nqc = jnp.where(is_seen_qc[None], jnp.exp(scores_nqc - max_nq[..., None]), 0.0)
            decay_nq = jnp.exp(state.max_nq - max_nq)
            acc_nqh = multiply("nqc,nch->nqh", probs_nqc.astype(v_nch.dtype), v_nch)
            return _Softmax(
                max_nq, state.sum_nq * decay_nq + probs_nqc.sum(axis=-1), state.acc_nqh * decay_nq[..., None] + acc_nqh
            )

        nothing = _Softmax(jnp.full((n, tile), _MASKED), jnp.zeros((n, tile)), jnp.zeros((n, tile, h)))
        if num_tiles is None:
            state = lax.fori_loop(first, (ends_q.max() + tile - 1) // tile, body, nothing)
        else:
            # In the last tiles of keys some iterations see nothing; none of them may leave the array, or see a tile
            # twice.
            first = jnp.clip(first, 0, max(0, most - num_tiles))
            state = lax.fori_loop(0, min(most, num_tiles), lambda i, state: body(first + i, state), nothing)
        out_nqh = state.acc_nqh / jnp.maximum(state.sum_nq, 1e-30)[..., None]
        return lax.dynamic_update_slice_in_dim(x_pnh, out_nqh.swapaxes(0, 1).astype(x_pnh.dtype), number * tile, axis=0)

    # The results of a tile take the place of its queries. XLA:GPU would make the zeros for results of all layers first.
    return lax.fori_loop(0, most, attend, q_pnh)[:p]
